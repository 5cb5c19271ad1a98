"""Memory of this side's GPU that a buffer's side reads: what is put lies there.

One allocation, shown on each link anew. What a peer was told of stays as it is until
the peer says that it is through with it, or has closed the memory: a socket of its own
says so, also of who was killed.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import TYPE_CHECKING, Final

from asynckv.errors import ConfigError, PeerLost
from asynckv.links.answers import Answer, fail_by
from asynckv.links.exporting import LEAST_NBYTES
from asynckv.links.link import Link
from asynckv.links.sharing import MapHolder, Sharing
from asynckv.protocol.frames import Accepted, Cancel, Frame
from asynckv.protocol.ipc_frames import Exported, Imported, ShowIpc
from asynckv.tensors.growth import Growth

if TYPE_CHECKING:
    from asynckv.links.sharing import MapDigest

__all__ = ("ShownSources",)

logger = logging.getLogger(__name__)

_SHOW_S: Final = 2.0
_TELL_S: Final = 0.1


class ShownSources:
    """Shows memory of ``growth``, which is on a GPU; ``digest`` is what is compared."""

    def __init__(self, growth: Growth, digest: MapDigest) -> None:
        self._growth = growth
        self._digest: MapDigest = digest
        self._sharing = Sharing(growth.arena, self._look, growth.drop_soon)
        self._holders: weakref.WeakKeyDictionary[Link, MapHolder] = (
            weakref.WeakKeyDictionary()
        )

    def holder(self, link: Link) -> MapHolder | None:
        """Return who reads at the other end of ``link``, if somebody does."""
        holder = self._holders.get(link)
        return holder if holder is not None and holder.is_usable else None

    async def show(self, link: Link, uuid: str) -> None:
        """Let the other end of ``link``, which has that GPU too, open the memory.

        Waits at most 2 s. A cancelled call leaves nothing behind.

        :raises AsyncKVError: one of both cannot, or will not
        :raises TimeoutError: the peer did not answer
        """
        found = self._sharing.export(link, uuid, self._digest)
        if found is None:
            raise ConfigError("this side has no memory of that GPU to show")
        holder, exported = found
        link.call_when_lost(lambda _: holder.link_over())
        try:
            if exported.nbytes < LEAST_NBYTES:
                raise ConfigError("this side has too little memory of that GPU to show")
            async with asyncio.timeout(_SHOW_S):
                await _shown(link, uuid, exported, holder)
        except BaseException:
            holder.link_over()
            raise
        self._holders[link] = holder
        logger.info("what is put at %s is read in memory of a GPU", link.peer.id)

    def close(self) -> None:
        """Show nothing more. Never waits."""
        self._sharing.close()

    async def aclose(self) -> None:
        """As :meth:`close`; wait until every peer has closed it, at most 2 s.

        Who has not then keeps the memory.
        """
        self.close()
        await self._sharing.aclose()

    def _look(self) -> None:
        """A peer is gone, or has closed the memory."""
        for link, holder in list(self._holders.items()):
            if not holder.is_connected:
                del self._holders[link]
                # A peer that is gone has closed both: that is no news then.
                loop = asyncio.get_running_loop()
                loop.call_later(_TELL_S, _tell_loss, link)


async def _shown(link: Link, uuid: str, exported: Exported, holder: MapHolder) -> None:
    showing = _Showing(link, uuid, exported, holder)
    try:
        await showing.accepted
    except BaseException:
        showing.cancel()
        raise


class _Showing:
    """The stream on which a peer is shown memory, and proves that it reads it."""

    def __init__(
        self, link: Link, uuid: str, exported: Exported, holder: MapHolder
    ) -> None:
        self.accepted: Answer[None] = Answer()
        self._holder = holder
        self._stream = link.open_stream(self, ShowIpc(uuid))
        self._stream.send(exported)

    def cancel(self) -> None:
        self._stream.send(Cancel())

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Imported(found=found):
                if not self._holder.verify(found):
                    error = ConfigError("that is not what the memory holds")
                    self.accepted.fail(error)
            case Accepted():
                self.accepted.give(None)
            case _:
                fail_by(frame, "reading of a GPU's memory", self.accepted.fail)

    def on_lost(self, error: PeerLost) -> None:
        self.accepted.fail(error)


def _tell_loss(link: Link) -> None:
    if link.is_open:
        logger.warning(
            "what is put at %s goes through host memory from here on: "
            "the peer has closed memory of this side's GPU",
            link.peer.id,
        )

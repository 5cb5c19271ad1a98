"""A link that is made again when it was cut, for a bounded time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import anyio

from asynckv.buffers.backoff import Backoff
from asynckv.errors import AsyncKVError, PeerLost, PeerRestarted
from asynckv.links.answers import Watchers
from asynckv.links.link import Link

__all__ = ("ReconnectingLink",)

logger = logging.getLogger(__name__)

_DIAL_S: Final = 10.0


class ReconnectingLink:
    """The link to ``url``, and the next one when that was cut.

    ``dial`` makes one, in so many seconds at most. It is tried for ``reconnect_s``
    seconds after a cut, but not after a goodbye, nor where this side has ended the
    link. While links are cut before they have answered anything, the pauses between
    them grow to 1 s.
    """

    def __init__(
        self, url: str, reconnect_s: float, dial: Callable[[float], Awaitable[Link]]
    ) -> None:
        self.current: Link | None = None
        """The last one that was made, be it cut or not."""
        self._url = url
        self.reconnect_s = reconnect_s
        self._dial = dial
        self._error: PeerLost | None = None
        self._is_closing = False
        self._reconnecting: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._watchers = Watchers()

    @property
    def is_open(self) -> bool:
        """Whether a request could leave now."""
        return self.current is not None and self.current.is_open

    def linked(self) -> Link:
        """Return the last one that was made.

        :raises RuntimeError: none was
        """
        if self.current is None:
            raise RuntimeError("the peer is not connected; use 'async with connect()'")
        return self.current

    def link_nowait(self) -> Link | None:
        """Return the link if it is up, ``None`` while it is made again.

        :raises PeerLost: the peer is gone and did not come back in time
        """
        link = self.current or self.linked()
        if self._error is not None:
            raise PeerLost(self._error.message, hint=self._error.hint)
        return link if link.is_open else None

    async def link(self, incarnation: str) -> Link:
        """Return a link that is up, waiting while it is made again.

        A cancelled call leaves no trace.

        :raises PeerLost: the peer is gone and did not come back in time
        :raises PeerRestarted: it is not the ``incarnation`` that was given
        """
        while (link := self.link_nowait()) is None:
            await self._watchers.next_change(asyncio.get_running_loop())
        if incarnation and link.peer.incarnation != incarnation:
            raise PeerRestarted(
                f"{self._url} came back without its memory",
                hint="what was under way is gone; make the call again",
            )
        return link

    def check_new(self) -> None:
        """Refuse a second use.

        :raises RuntimeError: it was opened, or closed, before
        """
        if self.current is not None or self._is_closing:
            raise RuntimeError("the peer was entered before; connect again")

    async def open(self) -> None:
        """Make the first one, 10 s at most. A cancelled call leaves none.

        :raises Exception: why it cannot be made
        """
        self.use(await self._dial(_DIAL_S))

    def use(self, link: Link) -> None:
        """This is the one from here on."""
        self.current = link
        link.call_when_lost(partial(self._on_lost, link))
        self._watchers.wake()

    async def aclose(self) -> None:
        """Say goodbye, and make no more. Bounded, shielded, repeatable."""
        self._end(PeerLost(f"the connection to {self._url} was closed on this side"))
        with anyio.CancelScope(shield=True):
            if self._reconnecting is not None:
                self._reconnecting.cancel()
                await asyncio.wait({self._reconnecting})
            if self.current is not None:
                await self.current.aclose()

    def abort(self) -> None:
        """Hang up now, and make no more. Never waits."""
        self._end(PeerLost(f"the connection to {self._url} was aborted on this side"))
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self.current is not None:
            self.current.abort()

    def _on_lost(self, link: Link, error: PeerLost) -> None:
        if self._is_closing or link is not self.current:
            return
        if link.was_answered:
            self._backoff.reset()
        cause = error.__cause__
        ours = isinstance(cause, Exception) and not isinstance(cause, OSError)
        if error.goodbye or ours or self.reconnect_s <= 0:
            # What broke the rules of the wire once would do so again.
            self._end(error)
        else:
            logger.warning("the link to %s was lost; dialling again", self._url)
            self._reconnecting = asyncio.get_running_loop().create_task(
                self._reconnect(error), name=f"asynckv: reconnect to {self._url}"
            )

    async def _reconnect(self, lost: PeerLost) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.reconnect_s
        await asyncio.sleep(self._backoff.next_pause_s())
        while (left_s := deadline - loop.time()) > 0:
            try:
                link = await self._dial(min(left_s, _DIAL_S))
            except (PeerLost, OSError, TimeoutError):
                await asyncio.sleep(self._backoff.next_pause_s())
            except AsyncKVError as exc:
                self._end(PeerLost(f"{self._url} refuses this peer now: {exc}"))
                return
            else:
                logger.warning("connected again to %s", self._url)
                self.use(link)
                return
        self._end(
            PeerLost(
                f"{lost.message}, and {self._url} could not be reached again within "
                f"{self.reconnect_s:g} s",
                hint="is its process alive? connect(reconnect_s=...) waits longer",
            )
        )

    def _end(self, error: PeerLost) -> None:
        self._is_closing = True
        self._error = self._error or error
        self._watchers.wake()

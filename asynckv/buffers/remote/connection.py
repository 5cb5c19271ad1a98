"""What the buffers of one peer share: its link, questions, and memory for payload."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Literal

import anyio

from asynckv.abc import KVCacheBuffer
from asynckv.affinity import LoopBound
from asynckv.devices.growth import Growth
from asynckv.devices.names import Device
from asynckv.errors import AsyncKVError, PeerLost, PeerRestarted
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.protocol.failures import fail_by
from asynckv.protocol.frames import Cancel, Frame, OpeningFrame, Result
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.sharing.peer_imports import PeerImports
from asynckv.transfers.delivery import ReceiveBudget
from asynckv.transfers.routes import GpuRoutes, PeerRoutes
from asynckv.types import KVFingerprint, as_timeout
from asynckv.waits.waiting import Reply, Watchers

__all__ = (
    "ANSWER_S",
    "STEADY_S",
    "Backoff",
    "PeerBuffer",
    "PeerConnection",
    "ReconnectingLink",
    "ask",
)


_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
STEADY_S: Final = 2.0
"""A link that is cut sooner may have been made in vain, as the next one would be."""


class Backoff:
    """No pause at first, then longer and longer ones until :meth:`reset`."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def next_pause_s(self) -> float:
        """Return the pause before the next attempt.

        Many peers of one server shall not all come in one moment, so it is half
        of its length or more, by chance.
        """
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        return pause_s

    def reset(self) -> None:
        """An attempt was of use."""
        self._pause_s = 0.0


logger = logging.getLogger(__name__)

_DIAL_S: Final = 10.0


class ReconnectingLink:
    """The link to ``url``, and the next one when that was cut.

    ``dial`` makes one, in so many seconds at most. It is tried for ``reconnect_s``
    seconds after a cut, but not after a goodbye, nor where this side has ended the
    link. While links are cut before they have answered anything, or within 2 s, the
    pauses between them grow to 1 s: two peers of one identity end each other's.
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
        self._made_at = 0.0
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
        self._made_at = asyncio.get_running_loop().time()
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
        try:
            self._go_on(link, error)
        except BaseException:
            self._end(error)  # whatever it is: who waits shall not hang
            raise

    def _go_on(self, link: Link, error: PeerLost) -> None:
        loop = asyncio.get_running_loop()
        if link.was_answered and loop.time() - self._made_at >= STEADY_S:
            self._backoff.reset()
        cause = error.__cause__
        ours = isinstance(cause, Exception) and not isinstance(cause, OSError)
        if error.goodbye or ours or self.reconnect_s <= 0:
            # What broke the rules of the wire once would do so again.
            self._end(error)
        else:
            logger.warning("the link to %s was lost; dialling again", self._url)
            self._reconnecting = loop.create_task(
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
            except Exception:
                # Whatever it is, as no thread to be had: who waits shall not hang.
                logger.exception("%s could not be dialled", self._url)
                await asyncio.sleep(self._backoff.next_pause_s())
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


class PeerConnection(LoopBound):
    """To one server of buffers, at ``url``. ``routes`` are what payload comes
    and goes by.

    Within ``max_bytes`` what comes lands in ``memory``, or ``on_gpu``.
    """

    def __init__(
        self,
        url: str,
        *,
        own_identity: PeerIdentity,
        fingerprint: KVFingerprint | None,
        digest: Literal["full", "off"],
        map_digest: Literal["full", "edges", "off"] = "edges",
        device_digest: Literal["full", "edges", "off"] = "full",
        lanes: int | None,
        reconnect_s: float,
        max_bytes: int,
        keyring: Keyring = NO_KEYS,
        device: Device | None = None,
    ) -> None:
        self.url = url
        self.own_identity = own_identity
        self.memory = Growth(max_bytes)
        self.budget = ReceiveBudget(max_bytes, self.memory)
        self.on_gpu = None if device is None else Growth(max_bytes, device=device)
        """Memory of the GPU that deliveries land in, if they are to."""
        self._imports = PeerImports(
            *(map_digest, own_identity.boot_id),
            url=url,
            growth=self.on_gpu,
            device_digest=device_digest,
        )
        reconnect_s = as_timeout(reconnect_s, "reconnect_s")
        self._links = ReconnectingLink(url, reconnect_s, self._dial)
        self.routes = (
            PeerRoutes(self._imports, self.budget, self.memory.make_pool())
            if self.on_gpu is None
            else GpuRoutes(self._imports, self.budget, self.on_gpu)
        )
        self.pool = self.routes.pool
        self._new_link = partial(
            dial,
            url,
            identity=own_identity,
            fingerprint=fingerprint,
            digest=digest,
            lanes=lanes,
            limits=Limits(max_receive_bytes=max_bytes),
            keyring=keyring,
        )

    @property
    def reconnect_s(self) -> float:
        """For so long a connection that was cut is made again."""
        return self._links.reconnect_s

    @reconnect_s.setter
    def reconnect_s(self, seconds: float) -> None:
        self._links.reconnect_s = as_timeout(seconds, "reconnect_s")

    @property
    def is_connected(self) -> bool:
        """Whether a request could leave now."""
        return self._links.is_open

    @property
    def sends_from(self) -> str:
        """The GPU from which what is put goes to the peer's now, else ``"cpu"``."""
        return self.routes.sends_from(self._links.current)

    @property
    def reads_gpu(self) -> bool:
        """Are entries read in the peer's memory of this side's own GPU now?"""
        return self.routes.reads_gpu(self._links.current)

    def check(self) -> asyncio.AbstractEventLoop:
        """Return the loop this peer belongs to.

        :raises WrongLoop: it is not the running one
        :raises RuntimeError: the peer was not entered
        """
        loop = self._check_loop()
        self._linked()
        return loop

    def link_nowait(self) -> Link | None:
        """Return the link if it is up, ``None`` while it is made again.

        :raises PeerLost: the peer is gone and did not come back in time
        """
        self._check_loop()
        return self._links.link_nowait()

    async def link(self, incarnation: str = "") -> Link:
        """Return a link that is up, waiting while it is made again.

        A cancelled call leaves no trace.

        :raises PeerLost: the peer is gone and did not come back in time
        :raises PeerRestarted: it is not the ``incarnation`` that was given
        """
        self._check_loop()
        return await self._links.link(incarnation)

    async def aclose(self) -> None:
        """Say goodbye; what is leased goes back. Bounded, shielded, repeatable."""
        self._check_loop()
        try:
            await self._links.aclose()
        finally:  # also if the task is cancelled: nothing stays open
            self.abort()
            with anyio.CancelScope(shield=True):
                await self._imports.aclose()
                await self.memory.aclose()
                await self.routes.aclose()

    def abort(self) -> None:
        """Hang up now. Never waits."""
        self._links.abort()
        self.pool.close()
        self._imports.close()
        self.routes.close()
        self.memory.close()

    async def _dial(self, timeout_s: float) -> Link:
        link = await self._new_link(timeout_s=timeout_s)
        try:
            await self._imports.open(link)
        except BaseException:
            self._imports.detach(link)
            raise
        return link

    def _linked(self) -> Link:
        return self._links.linked()


class PeerBuffer(KVCacheBuffer):
    """A buffer that ``peer`` serves, which is the only way to it: both are closed."""

    def __init__(self, peer: PeerConnection) -> None:
        self._peer = peer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._peer!r}>"

    async def aclose(self) -> None:
        await self._peer.aclose()

    def abort(self) -> None:
        self._peer.abort()


ANSWER_S: Final = 30.0
"""A live peer answers a question that needs no waiting within this time."""


class _Question:
    """One question on one link."""

    def __init__(self, link: Link, frame: OpeningFrame, body: bytes) -> None:
        self.answer: Reply[Result] = Reply()
        self._stream = link.open_stream(self, frame, body)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if isinstance(frame, Result):
            self.answer.give(frame)
        else:
            fail_by(frame, "question", self.answer.fail)

    def on_lost(self, error: PeerLost) -> None:
        self.answer.fail(error)

    def cancel(self) -> None:
        """The answer is not wanted any more. Never waits."""
        self._stream.send(Cancel())


async def ask(
    peer: PeerConnection,
    frame: OpeningFrame,
    body: bytes = b"",
    *,
    deadline_s: float | None = ANSWER_S,
    incarnation: str = "",
) -> Result:
    """Ask, again after a reconnect, and return the answer.

    Bounded from the call on, however often the link is cut: by ``deadline_s``
    and the ``reconnect_s`` of the peer; not at all with ``None``, which is for
    what may wait. A cancelled call leaves no trace.

    :raises TimeoutError: a live peer did not answer in ``deadline_s``, or no
        link lived for long enough
    :raises PeerLost: the peer is gone and did not come back in time
    :raises PeerRestarted: it has lost what ``incarnation`` knew
    """
    in_all_s = None if deadline_s is None else deadline_s + peer.reconnect_s
    async with asyncio.timeout(in_all_s):
        while True:
            link = await peer.link(incarnation)
            question = _Question(link, frame, body)
            try:
                async with asyncio.timeout(deadline_s):
                    return await question.answer
            except PeerLost:
                if link.is_open:
                    raise  # the peer says so, of something else
            except BaseException:
                question.cancel()
                raise

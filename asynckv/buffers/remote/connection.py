"""What the buffers of one peer share: its link, questions, and memory for payload."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

import anyio

from asynckv.buffers.remote.links import PeerWays, ReconnectingLink
from asynckv.errors import PeerLost
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.links.requests import fail_by
from asynckv.loops import LoopBound
from asynckv.protocol.frames import Cancel, Frame, OpeningFrame, Result
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.sharing.peer_imports import PeerImports
from asynckv.tensors.devices import Device
from asynckv.tensors.growth import Growth
from asynckv.transfers.budget import ReceiveBudget
from asynckv.types import KVFingerprint
from asynckv.waits.replies import Reply

__all__ = ("ANSWER_S", "PeerConnection", "ask")


class PeerConnection(LoopBound):
    """To one server of buffers, at ``url``. ``ways`` is what payload comes and goes by.

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
        self.pool = (self.on_gpu or self.memory).make_pool()
        self._imports = PeerImports(
            *(map_digest, own_identity.boot_id),
            url=url,
            growth=self.on_gpu,
            device_digest=device_digest,
        )
        self._links = ReconnectingLink(url, reconnect_s, self._dial)
        self.ways = PeerWays(
            *(self._links, self._imports, self.budget, self.pool, self.on_gpu)
        )
        self._fingerprint = fingerprint
        self._digest: Literal["full", "off"] = digest
        self._lanes = lanes
        self._keyring = keyring

    @property
    def reconnect_s(self) -> float:
        """For so long a connection that was cut is made again."""
        return self._links.reconnect_s

    @reconnect_s.setter
    def reconnect_s(self, seconds: float) -> None:
        self._links.reconnect_s = seconds

    @property
    def is_connected(self) -> bool:
        """Whether a request could leave now."""
        return self._links.is_open

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
                if self.on_gpu is not None:
                    await self.on_gpu.aclose()

    def abort(self) -> None:
        """Hang up now. Never waits."""
        self._links.abort()
        self.pool.close()
        self._imports.close()
        self.ways.close()
        self.memory.close()
        if self.on_gpu is not None:
            self.on_gpu.close()

    async def _dial(self, timeout_s: float) -> Link:
        link = await dial(
            self.url,
            identity=self.own_identity,
            fingerprint=self._fingerprint,
            digest=self._digest,
            lanes=self._lanes,
            limits=Limits(max_receive_bytes=self.budget.max_bytes),
            keyring=self._keyring,
            timeout_s=timeout_s,
        )
        try:
            await self._imports.open(link)
        except BaseException:
            self._imports.leave(link)
            raise
        return link

    def _linked(self) -> Link:
        return self._links.linked()


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

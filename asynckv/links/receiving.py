"""The receiving half of a transfer: bytes by payload, their digests by control.

A part counts when its bytes have landed, its ``Done`` has come, and the digests
agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.protocol.frames import Done

__all__ = ("PartSink", "Reception")


class PartSink(Protocol):
    """Who receives. Called on the loop; never waits."""

    def part_verified(self, index: int, digest: bytes) -> None:
        """The part is whole, and its bytes are those that were sent."""

    def reception_failed(self, error: Exception) -> None:
        """The transfer will not become whole."""


class Reception:
    """One transfer on its way into memory that ``sink`` owns.

    It forgets the ``sink`` when there is nothing more to tell: whoever keeps both
    would keep the memory too until the garbage collector comes.
    """

    def __init__(
        self, link: Link, transfer: int, targets: Sequence[memoryview], sink: PartSink
    ) -> None:
        self.transfer = transfer
        self._link = link
        self._targets = targets
        self._parts = len(targets)
        self._sink: PartSink | None = sink
        self._unverified = len(targets)
        self._landed: dict[int, bytes] = {}
        self._sent: dict[int, bytes] = {}
        self._is_stopped = False

    def begin(self, *, whole: bool = True) -> None:
        """Let bytes land. To be called before the peer is granted the transfer.

        If ``whole``, all of them are there to be sent: see :meth:`expect`.
        """
        for index, target in enumerate(self._targets):
            self._link.payload.receive(
                self.transfer, index, target, self._done_with(index)
            )
        self._targets = ()  # the transport's alone: its memory may be wanted back
        if whole:
            self.expect()

    def expect(self) -> None:
        """From here on bytes that do not come end the link (``STALL_S``)."""
        if not self._is_stopped and len(self._landed) < self._parts:
            self._link.progress.expect(self.transfer)

    def on_done(self, frame: Done) -> None:
        """The peer says that it has sent a part.

        :raises RemoteProtocolError: there is no such part, or it was sent before
        """
        if self._is_stopped:
            return
        if frame.part >= self._parts or frame.part in self._sent:
            raise RemoteProtocolError(f"a Done for part {frame.part} makes no sense")
        self._sent[frame.part] = frame.digest
        self._compare(frame.part)

    def stop(self) -> None:
        """Let nothing more land. The memory is quiet after :meth:`quiesce`."""
        self._is_stopped = True
        self._sink = None
        self._link.progress.forget(self.transfer)
        self._link.payload.stop(self.transfer)

    async def quiesce(self) -> None:
        """Stop, and wait until no thread touches the memory (at most 1 s)."""
        self._is_stopped = True
        self._sink = None
        self._link.progress.forget(self.transfer)
        await self._link.payload.quiesce(self.transfer)

    def _done_with(self, index: int) -> Callable[[bytes, BaseException | None], None]:
        def done(digest: bytes, error: BaseException | None) -> None:
            if error is None and not self._is_stopped:
                self._landed[index] = digest
                if len(self._landed) == self._parts:
                    self._link.progress.forget(self.transfer)
                self._compare(index)

        return done  # an error ends the link too, and is told by on_lost

    def _compare(self, index: int) -> None:
        landed, sent = self._landed.get(index), self._sent.get(index)
        sink = self._sink
        if landed is None or sent is None or sink is None:
            return
        if landed != sent:
            self.stop()
            sink.reception_failed(
                ChecksumError(
                    f"part {index} arrived with other bytes than were sent",
                    hint="the delivery was refused; nothing of it was used",
                )
            )
        else:
            self._unverified -= 1
            if not self._unverified:
                self._sink = None
            sink.part_verified(index, landed)

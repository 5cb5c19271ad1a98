"""The receiving half of a transfer: bytes by payload, their digests by control.

A part counts when its bytes have landed, its ``Done`` has come, and the digests
agree. Small parts ride with the frame that has their digests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.progress import Progress
from asynckv.protocol.digests import digest_of
from asynckv.protocol.transfer_frames import Done, Riders
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.runs import Memory, fill
from asynckv.transfers.manifest import is_eager

__all__ = ("PartReceiver", "PartSink", "Reception")


class PartSink(Protocol):
    """Who receives. Called on the loop; never waits."""

    def part_verified(self, index: int, digest: bytes) -> None:
        """The part is whole, and its bytes are those that were sent."""

    def reception_failed(self, error: Exception) -> None:
        """The transfer will not become whole."""


class PartReceiver(Protocol):
    """What a payload transport does for whoever receives by it."""

    def receive(
        self,
        transfer: int,
        part: int,
        target: Memory | DeviceMemory,
        done: Callable[[bytes, BaseException | None], None],
    ) -> None:
        """Let the bytes of one part land in ``target``. Never waits."""

    def stop(self, transfer: int) -> None:
        """Let nothing more of it land. Never waits."""

    async def quiesce(self, transfer: int) -> None:
        """Wait until nothing touches memory of the stopped transfer."""


class Reception:
    """One transfer on its way into memory that ``sink`` owns.

    It forgets the ``sink`` when there is nothing more to tell: whoever keeps both
    would keep the memory too until the garbage collector comes.

    If ``has_riders``, small parts come by :meth:`on_riders` only. The others come by
    ``payload``, the link's own by default; only the end of another one is an error of
    the transfer alone. If what it tells ``is_compared``, no ``Done`` follows. Parts
    whose target is None do not come here.
    """

    def __init__(
        self,
        link: Link,
        transfer: int,
        targets: Sequence[Memory | DeviceMemory | None],
        sink: PartSink,
        *,
        has_riders: bool = False,
        payload: PartReceiver | None = None,
        progress: Progress | None = None,
        is_compared: bool = False,
    ) -> None:
        self.transfer = transfer
        self._link = link
        # The link's own is given memory of the host alone.
        self._payload = payload or cast(PartReceiver, link.payload)
        self._is_the_links = payload is None
        self._progress = progress or link.progress
        self._targets = targets
        self._has_riders = has_riders
        self._small: dict[int, Memory] = {}
        self._parts = len(targets)
        self._absent = {i for i, target in enumerate(targets) if target is None}
        self._sink: PartSink | None = sink
        self._unlanded = self._unverified = len(targets) - len(self._absent)
        self._landed: dict[int, bytes] = {}
        self._sent: dict[int, bytes] = {}
        self._is_compared = is_compared
        self._is_expected = False
        self._is_stopped = False

    def begin(self, *, whole: bool = True) -> None:
        """Let bytes land. To be called before the peer is granted the transfer.

        If ``whole``, all of them are there to be sent: see :meth:`expect`.
        """
        for index, target in enumerate(self._targets):
            if target is None:
                continue
            rider = self._has_riders and is_eager(target.nbytes)
            if rider and not isinstance(target, DeviceMemory):
                self._small[index] = target
            else:
                self._payload.receive(
                    self.transfer, index, target, self._done_with(index)
                )
        self._targets = ()  # the transport's alone: its memory may be wanted back
        if whole:
            self.expect()

    def expect(self) -> None:
        """From here on bytes that do not come end the link (``STALL_S``)."""
        if not self._is_stopped and self._unlanded and not self._is_expected:
            self._is_expected = True
            self._progress.expect(self.transfer)

    def on_parts(self, frame: Done | Riders, body: bytes) -> None:
        """The peer says that it has sent some: see :meth:`on_done`."""
        if isinstance(frame, Done):
            self.on_done(frame)
        else:
            self.on_riders(frame, body)

    def on_done(self, frame: Done) -> None:
        """The peer says that it has sent a part.

        :raises RemoteProtocolError: there is no such part, or it was sent before
        """
        if self._is_stopped:
            return
        part = frame.part
        is_one = part < self._parts and part not in self._absent
        if not is_one or part in self._sent or part in self._small:
            raise RemoteProtocolError(f"a Done for part {part} makes no sense")
        self._sent[part] = frame.digest
        self._compare(part)

    def on_riders(self, frame: Riders, body: bytes) -> None:
        """Small parts came: at most what fits in a frame's body.

        :raises RemoteProtocolError: they are none that ride, came before, or are
            not as long as they should be
        """
        if self._is_stopped:
            return
        digests = frame.digests or (b"",) * len(frame.parts)
        targets = [self._take_small(part) for part in frame.parts]
        if len(digests) != len(targets) or sum(t.nbytes for t in targets) != len(body):
            raise RemoteProtocolError("Riders that are not what their parts are")
        self._progress.note(len(body))
        view, start = memoryview(body), 0
        is_digested = self._link.digest != "off"
        for part, digest, target in zip(frame.parts, digests, targets, strict=True):
            piece = view[start : start + target.nbytes]
            start += target.nbytes
            fill(target, piece)
            self._sent[part] = digest
            self._land_one()
            self._judge(part, digest_of(piece) if is_digested else b"", digest)
            if self._is_stopped:
                return

    def fail(self, error: BaseException) -> None:
        """Stop, and tell the sink why, if it still waits for something."""
        sink = self._sink
        self.stop()
        if sink is not None and isinstance(error, Exception):
            sink.reception_failed(error)

    def stop(self) -> None:
        """Let nothing more land. The memory is quiet after :meth:`quiesce`."""
        self._is_stopped = True
        self._sink = None
        self._small.clear()
        self._expect_no_more()
        self._payload.stop(self.transfer)

    async def quiesce(self) -> None:
        """Stop, and wait until no thread touches the memory (at most 1 s)."""
        self._is_stopped = True
        self._sink = None
        self._small.clear()
        self._expect_no_more()
        await self._payload.quiesce(self.transfer)

    def _expect_no_more(self) -> None:
        if self._is_expected:  # another part of the transfer may be, elsewhere
            self._is_expected = False
            self._progress.forget(self.transfer)

    def _done_with(self, index: int) -> Callable[[bytes, BaseException | None], None]:
        def done(digest: bytes, error: BaseException | None) -> None:
            if self._is_stopped:
                return
            if error is None:
                self._land(index, digest)
            elif not self._is_the_links:
                self.fail(error)

        return done  # an error of the link's own ends it too, and is told by on_lost

    def _take_small(self, part: int) -> Memory:
        target = self._small.pop(part, None)
        if target is None:
            raise RemoteProtocolError(f"part {part} came along, which makes no sense")
        return target

    def _land(self, index: int, digest: bytes) -> None:
        self._landed[index] = digest
        if self._is_compared:
            self._sent[index] = digest
        self._land_one()
        self._compare(index)

    def _land_one(self) -> None:
        self._unlanded -= 1
        if not self._unlanded:
            self._expect_no_more()

    def _compare(self, index: int) -> None:
        landed, sent = self._landed.get(index), self._sent.get(index)
        if landed is not None and sent is not None:
            self._judge(index, landed, sent)

    def _judge(self, index: int, landed: bytes, sent: bytes) -> None:
        """Both sides have digested it."""
        sink = self._sink
        if sink is None:
            return
        if landed != sent:
            self.fail(
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

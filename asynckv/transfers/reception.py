"""The receiving half of a pipe's transfer: one part, by the link or by a route.

It counts when its bytes have landed, its ``Sent`` has come, and the digests agree.
What comes by a route is compared there.
"""

from __future__ import annotations

from typing import Protocol

from asynckv.errors import RemoteProtocolError
from asynckv.links.link import Link
from asynckv.protocol.transfer_frames import Sent
from asynckv.sharing.gpu_channel import other_bytes
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.runs import Memory
from asynckv.transfers.incoming import DeviceRoute

__all__ = ("PartSink", "Reception")


class PartSink(Protocol):
    """Who receives. Called on the loop; never waits."""

    def part_verified(self) -> None:
        """The part is whole, and its bytes are those that were sent."""

    def reception_failed(self, error: Exception) -> None:
        """The transfer will not become whole."""


class Reception:
    """One part on its way into memory that ``sink`` owns.

    It forgets the ``sink`` when there is nothing more to tell: whoever keeps both
    would keep the memory too until the garbage collector comes.
    """

    def __init__(self, link: Link, transfer: int, sink: PartSink) -> None:
        self._link = link
        self._transfer = transfer
        self._sink: PartSink | None = sink
        self._route: DeviceRoute | None = None
        self._progress = link.progress
        self._landed: bytes | None = None
        self._sent: bytes | None = None
        self._is_expected = False

    def begin(self, target: Memory) -> None:
        """Let it land. To be called before the peer is granted the transfer."""
        self._expect()
        self._link.payload.receive(self._transfer, 0, target, self._has_landed)

    def begin_by(self, route: DeviceRoute, place: DeviceMemory) -> None:
        """As :meth:`begin`, by a route from another GPU; only its end is an error."""
        self._route, self._progress = route, route.progress
        self._expect()
        route.receive(self._transfer, 0, place, self._has_come)

    def on_sent(self, frame: Sent) -> None:
        """The peer says that it has sent the part.

        :raises RemoteProtocolError: there is no such part, or it was sent before
        """
        if self._sink is None:
            return
        if frame.part or self._sent is not None or self._route is not None:
            raise RemoteProtocolError(f"a Sent for part {frame.part} makes no sense")
        self._sent = frame.digest
        self._compare()

    def stop(self) -> None:
        """Let nothing more land. Never waits."""
        self._sink = None
        self._expect_no_more()
        if self._route is None:
            self._link.payload.stop(self._transfer)
        else:
            self._route.stop(self._transfer)

    def _expect(self) -> None:
        """From here on bytes that do not come end the link, or lose the route."""
        self._is_expected = True
        self._progress.expect(self._transfer)

    def _expect_no_more(self) -> None:
        if self._is_expected:
            self._is_expected = False
            self._progress.forget(self._transfer)

    def _has_landed(self, digest: bytes, error: BaseException | None) -> None:
        if self._sink is None or error is not None:
            return  # an error of the link's own ends it too, and is told by on_lost
        self._landed = digest
        self._expect_no_more()
        self._compare()

    def _has_come(self, digest: bytes, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            self._fail(error)
        else:
            self._is_whole()

    def _compare(self) -> None:
        if self._landed is None or self._sent is None:
            return
        if self._landed == self._sent:
            self._is_whole()
        else:
            self._fail(other_bytes(0))

    def _is_whole(self) -> None:
        sink, self._sink = self._sink, None
        self._expect_no_more()
        if sink is not None:
            sink.part_verified()

    def _fail(self, error: Exception) -> None:
        sink = self._sink
        self.stop()
        if sink is not None:
            sink.reception_failed(error)

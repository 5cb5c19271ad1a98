"""Streams and events: work in order, done when somebody looks.

All of it is called under the lock of the GPUs that it belongs to.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy
import torch

from asynckv.devices.cuda import Event, Stream
from asynckv.devices.tensors import index_rows
from asynckv.errors import GPUFailed
from harness.fake_gpus.memory import AddressSpace, Allocation, Bytes

if TYPE_CHECKING:
    from harness.fake_gpus.fabric import FakeGpus, FakeProcess

__all__ = (
    "Copy",
    "Delay",
    "FakeEvent",
    "FakeStream",
    "FakeTorchEvent",
    "FakeTorchStream",
    "Rows",
    "Work",
)


class Work(Protocol):
    """One piece of work of a stream, which is at its head when it is asked."""

    def run(self) -> bool:
        """Get on; whether it has ended.

        :raises GPUFailed: it never will, and nothing behind it
        """


class FakeStream:
    """Work that runs in order."""

    def __init__(self, process: FakeProcess, device: int, handle: int) -> None:
        self._process = process
        self.device = device
        self.handle = handle
        self.work: collections.deque[Work] = collections.deque()
        self.error: GPUFailed | None = None
        self._is_getting_on = False

    @property
    def gpus(self) -> FakeGpus:
        """Those that it is of."""
        return self._process.gpus

    def add(self, work: Work) -> None:
        """Queue work behind a delay of the GPUs' own choice.

        :raises GPUFailed: this stream's work has failed before
        """
        with self.gpus.lock:
            if self.error is not None:
                raise GPUFailed(f"this stream has failed: {self.error}", code=700)
            if ticks := self.gpus.delay():
                self.work.append(Delay(ticks))
            self.work.append(work)

    def get_on(self) -> None:
        """Do what can be done now. A finalizer that asks meanwhile is no hindrance."""
        if self._is_getting_on:
            return
        self._is_getting_on = True
        try:
            while self.work and self.work[0].run():
                self.work.popleft()
        except GPUFailed as exc:
            self.error = exc.with_traceback(None)  # which keeps what its callers have
            self.work.clear()
        finally:
            self._is_getting_on = False

    def wait(self, event: Event) -> None:
        if not isinstance(event, FakeEvent):
            raise TypeError(f"not an event of these GPUs: {event!r}")
        self.add(_Wait(event, event.recorded))

    def synchronize(self) -> None:
        self._process.cuda.check_capture("a stream was waited for")
        self.gpus.block(lambda: not self.work, "a stream to end")
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        with self.gpus.lock:
            self._process.streams.pop(self.handle, None)


class FakeTorchStream(FakeStream):
    """One of torch's: to be marked by torch, and no stream for calls of CUDA."""


class FakeEvent:
    """A mark: how often it was set, and how far it has fired."""

    def __init__(self, gpus: FakeGpus) -> None:
        self._gpus = gpus
        self.recorded = 0
        """How often it was set."""
        self._fired = 0
        self._streams: list[FakeStream] = []

    def has_fired(self, recorded: int) -> bool:
        """Whether all that was set until then has ended."""
        return self._fired >= recorded

    def record(self, stream: Stream) -> None:
        if not isinstance(stream, FakeStream) or isinstance(stream, FakeTorchStream):
            raise TypeError(f"not a stream of these GPUs: {stream!r}")
        self.record_any(stream)

    def record_any(self, stream: FakeStream) -> None:
        """As :meth:`record`, on one of torch's streams too."""
        with self._gpus.lock:
            self._streams = [stream]
            stream.add(_Fire(self, self.recorded + 1))
            self.recorded += 1

    def fire(self, recorded: int) -> None:
        """All before the mark has ended."""
        self._fired = max(self._fired, recorded)

    def query(self) -> bool:
        with self._gpus.lock:
            self._gpus.progress()
            for stream in self._streams:
                if stream.error is not None:
                    raise GPUFailed(str(stream.error), code=stream.error.code)
            return self.has_fired(self.recorded)

    def synchronize(self) -> None:
        self._gpus.block(self.query, "an event to fire")

    def close(self) -> None:
        self._streams = []


class FakeTorchEvent:
    """A mark of torch's: no stream of CUDA waits for it. Closed it marks nothing."""

    def __init__(self, event: FakeEvent) -> None:
        self._event: FakeEvent | None = event

    def record(self, stream: Stream) -> None:
        raise TypeError("an event of torch's is recorded by torch")

    def query(self) -> bool:
        return self._event is None or self._event.query()

    def synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def close(self) -> None:
        if self._event is not None:
            self._event.close()
        self._event = None


class _Fire:
    def __init__(self, event: FakeEvent, recorded: int) -> None:
        self._event = event
        self._recorded = recorded

    def run(self) -> bool:
        self._event.fire(self._recorded)
        return True


class _Wait:
    def __init__(self, event: FakeEvent, recorded: int) -> None:
        self._event = event
        self._recorded = recorded

    def run(self) -> bool:
        return self._event.has_fired(self._recorded)


class Delay:
    """Takes so many looks, and does nothing."""

    def __init__(self, ticks: int) -> None:
        self._ticks = ticks

    def run(self) -> bool:
        self._ticks -= 1
        return self._ticks < 0


class _Halves:
    """One half of the work at first, the other when it is looked at again.

    So whoever lets go of memory in between is seen to.
    """

    def __init__(
        self, space: AddressSpace, places: Sequence[tuple[int, int]], ticks: int
    ) -> None:
        self._space = space
        self._places = places
        self._ticks = ticks
        self._ends: list[tuple[Allocation, int]] = []

    def run(self) -> bool:
        if not self._ends:
            self._ends = [self._space.find(*place) for place in self._places]
            self._note(1)
            self._move(0, 1)
        self._ticks -= 1
        if self._ticks >= 0:
            return False
        self._move(1, 2)
        self._note(-1)
        return True

    def _note(self, users: int) -> None:
        for allocation, _ in self._ends:
            allocation.users += users
            self._space.note(allocation, users)

    def _move(self, start: int, stop: int) -> None:
        raise NotImplementedError

    def _bytes(self, number: int) -> Bytes:
        allocation, at = self._ends[number]
        return allocation.array[at : at + self._places[number][1]]


class Copy(_Halves):
    """Bytes from one address to another."""

    def __init__(
        self, space: AddressSpace, target: int, source: int, nbytes: int, ticks: int
    ) -> None:
        super().__init__(space, ((target, nbytes), (source, nbytes)), ticks)
        self._nbytes = nbytes

    def _move(self, start: int, stop: int) -> None:
        half = slice(start * self._nbytes // 2, stop * self._nbytes // 2)
        self._bytes(0)[half] = self._bytes(1)[half]


class Rows(_Halves):
    """Rows of a table to packed bytes, or from there, as torch's indexing does it.

    ``places`` are addresses and lengths of the table, of ids and of what is packed;
    ``shape`` is the table's: rows, bytes of one, and from one to the next.
    """

    def __init__(
        self,
        space: AddressSpace,
        places: Sequence[tuple[int, int]],
        shape: tuple[int, int, int],
        ticks: int,
        *,
        is_gathered: bool,
    ) -> None:
        super().__init__(space, places, ticks)
        self._shape = shape
        self._is_gathered = is_gathered

    def _move(self, start: int, stop: int) -> None:
        count, row, step = self._shape
        table = torch.from_numpy(self._bytes(0)).as_strided((count, row), (step, 1))
        ids = torch.from_numpy(self._bytes(1).view(numpy.int64))
        half = slice(start * len(ids) // 2, stop * len(ids) // 2)
        packed = torch.from_numpy(self._bytes(2)).view(len(ids), row)[half]
        try:
            with torch.inference_mode():
                index_rows(
                    table, ids[half], packed.view(-1), is_gathered=self._is_gathered
                )
        except (IndexError, RuntimeError) as exc:
            raise GPUFailed(f"an assertion on the device: {exc}", code=710) from exc

"""Copies of a GPU that is not there, held for as long as a test wants."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from asynckv.devices.cuda import Stream
from harness.fake_devices import FakeDevice
from harness.fake_gpus import FakeProcess
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import FakeStream

__all__ = ("bytes_of_tensor", "held_copies", "is_busy")

_Holds = Callable[[int, int, int], bool]


@contextlib.contextmanager
def held_copies(
    process: FakeProcess, holds: _Holds = lambda *_: True, *, have_begun: bool = False
) -> Iterator[Gate]:
    """Let copies of ``process`` wait for a gate; leaving opens it.

    ``holds`` is asked with the target, the source and the bytes of each. One that
    ``have_begun`` writes at once, and has not ended before the gate is opened.
    """
    gate, cuda, copy = Gate(), process.cuda, process.cuda.copy

    def hold(target: int, source: int, nbytes: int, stream: Stream) -> None:
        if not isinstance(stream, FakeStream):
            raise TypeError(stream)
        is_held = holds(target, source, nbytes)
        if is_held and not have_begun:
            stream.add(gate)
        copy(target, source, nbytes, stream)
        if is_held and have_begun:
            stream.add(gate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "copy", hold)
        try:
            yield gate
        finally:
            gate.open()


def bytes_of_tensor(gpu: FakeDevice, tensor: torch.Tensor, begin: int = 0) -> _Holds:
    """Return what holds copies from or to a tensor, from byte ``begin`` of it on.

    What is read of it to compare, a few bytes, is not held.
    """
    memory = gpu.tensors.memory_of(tensor)
    held = range(memory.address + begin, memory.address + memory.nbytes)

    def holds(target: int, source: int, nbytes: int) -> bool:
        return nbytes > 64 and (target in held or source in held)

    return holds


def is_busy(process: FakeProcess) -> bool:
    """Whether any work of its streams has not ended."""
    return any(stream.work for stream in process.streams.values())

"""Both sides of a pipe, in two processes on GPUs that are not there."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from asynckv.links.options import Digest
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.pipes.gpu_side import GpuSide
from asynckv.pipes.pipe import Pipe
from asynckv.tensors.paged_arena import PagedArena
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.testing.pipe_checks import LARGE, PIPE_BYTES
from harness.fake_devices import FakeDevice

__all__ = (
    "GpuPipes",
    "arenas_of",
    "expect_by_host",
    "gpu_side_of",
    "open_pipes_on",
    "used_bytes_of",
)


@dataclasses.dataclass(frozen=True)
class GpuPipes(abc.ABC):
    """``near`` has dialled, from ``ours``; ``far`` has accepted, on ``theirs``."""

    near: Pipe
    far: Pipe
    ours: FakeDevice
    theirs: FakeDevice

    @property
    @abc.abstractmethod
    def moved(self) -> int:
        """How much the near side has sent from GPU to GPU."""

    @abc.abstractmethod
    def break_off(self, *, near: bool) -> None:
        """Let what connects both GPUs break, at one of its ends."""

    @property
    def used_bytes(self) -> int:
        """What both pipes have of their memory of GPUs."""
        return sum(map(used_bytes_of, (self.near, self.far)))

    @property
    def opened(self) -> int:
        """How many allocations the two processes have open of each other's."""
        return sum(len(gpu.process.cuda._opened) for gpu in (self.ours, self.theirs))


def gpu_side_of(pipe: Pipe) -> GpuSide:
    """Return what a pipe has on its GPU.

    :raises LookupError: it has none, or was not asked yet
    """
    gpus = pipe._sends.gpus
    if gpus is None:
        raise LookupError("the pipe has no GPU")
    return gpus


def used_bytes_of(pipe: Pipe) -> int:
    """Return what a pipe uses of its memory of the GPU, or its peer may still read."""
    arena = gpu_side_of(pipe)._growth.arena
    if isinstance(arena, PagedArena):
        arena.collect()
    return arena.used_bytes + arena.pinned_bytes


def arenas_of(gpu: FakeDevice) -> list[int]:
    """Return what pipes have of the memory of a GPU: tensors and torch have less."""
    return [a.array.nbytes for a in gpu.process.owned if a.array.nbytes > PIPE_BYTES]


async def expect_by_host(pair: GpuPipes) -> None:
    """Send both ways, and expect that it arrives by way of host memory.

    :raises AssertionError: something else arrived, or it came another way
    """
    for sends, receives, gpu in (
        (pair.near, pair.far, pair.ours),
        (pair.far, pair.near, pair.theirs),
    ):
        await sends.send_tensor(gpu.tensor(noise(LARGE, 2)))
        found = await receives.recv_tensor()
        expect(found is not None and found.is_cuda, "it is not on the GPU")
        expect_same(found, noise(LARGE, 2))
    if "inline" in {pair.near.transport, pair.far.transport}:
        # The other side hears of it, but may not have heard yet.
        await until(lambda: pair.near.transport == pair.far.transport)
    ways = {pair.near.transport, pair.far.transport}
    expect(ways == {"inline"}, f"it came by {ways}")


@contextlib.asynccontextmanager
async def open_pipes_on(
    ours: FakeDevice,
    theirs: FakeDevice,
    *,
    url: str = "",
    listens: Digest = "auto",
    expected: str | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Pipe, Pipe]]:
    """Open a pipe between two GPUs, or two processes of one.

    ``options`` are those of ``open_pipe``, ``url`` the end of the URL that is dialled,
    ``listens`` the listener's digest. This waits until the pipe goes the ``expected``
    way, if one is.

    :raises AssertionError: it goes another way
    """
    common = {"lanes": 2, "max_bytes": PIPE_BYTES, **options}
    near_options = {"device": ours.device, **common}
    far_options = {**common, "device": theirs.device, "digest": listens}
    async with (
        listen_pipe("tcp://127.0.0.1:0", **far_options) as listener,
        open_pipe(listener.url + url, **near_options) as near,
        await listener.accept() as far,
    ):
        if expected is not None:
            await near.gpus_settled()
            await far.gpus_settled()
            found = {near.transport, far.transport}
            expect(found == {expected}, f"no way was opened: {found}")
        yield near, far

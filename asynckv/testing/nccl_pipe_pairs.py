"""Both sides of a pipe, in two processes with a GPU each that are not there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from asynckv.links.gpu_link import GpuLink
from asynckv.links.options import Digest
from asynckv.pipes.gpu_side import GpuSide
from asynckv.pipes.opening import listen_pipe, open_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.tensors.paged_arena import PagedArena
from asynckv.testing.expectations import expect
from asynckv.testing.fake_devices import FakeDevice, fake_device_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.pipe_checks.values import PIPE_BYTES

__all__ = ("NcclPipes", "gpu_side_of", "open_nccl_pipes", "used_bytes_of")


@dataclasses.dataclass(frozen=True)
class NcclPipes:
    """``near`` has dialled, from ``ours``; ``far`` has accepted, on ``theirs``."""

    near: Pipe
    far: Pipe
    ours: FakeDevice
    theirs: FakeDevice

    @property
    def near_way(self) -> GpuLink:
        """The near end of what connects both GPUs."""
        return _way_of(gpu_side_of(self.near))

    @property
    def far_way(self) -> GpuLink:
        """The far end of it."""
        return _way_of(gpu_side_of(self.far))

    @property
    def moved(self) -> int:
        """How many operations the near side has sent from GPU to GPU."""
        return self.near_way.transport.sender._sending._next

    @property
    def used_bytes(self) -> int:
        """What both pipes have of their memory of GPUs."""
        return sum(map(used_bytes_of, (self.near, self.far)))


def gpu_side_of(pipe: Pipe) -> GpuSide:
    """Return what a pipe has on its GPU.

    :raises LookupError: it has none, or was not asked yet
    """
    gpus = pipe._sends.gpus
    if gpus is None:
        raise LookupError("the pipe has no GPU")
    return gpus


def _way_of(gpus: GpuSide) -> GpuLink:
    if gpus.agreed_way is None:
        raise LookupError("nothing connects both GPUs")
    return gpus.agreed_way


def used_bytes_of(pipe: Pipe) -> int:
    """Return what a pipe uses of its memory of the GPU, or its peer may still read."""
    arena = gpu_side_of(pipe)._growth.arena
    if isinstance(arena, PagedArena):
        arena.collect()
    return arena.used_bytes + arena.pinned_bytes


@contextlib.asynccontextmanager
async def open_nccl_pipes(
    gpus: FakeGpus,
    *,
    url: str = "",
    listens: Digest = "auto",
    their_nccl: int | None = None,
    is_connected: bool = True,
    **options: Any,
) -> AsyncIterator[NcclPipes]:
    """Open a pipe between two of ``gpus``; ``options`` are those of ``open_pipe``.

    ``url`` is the end of the URL that is dialled, ``listens`` the listener's digest,
    ``their_nccl`` the version that it has. Unless ``is_connected`` is false this waits
    until both GPUs are connected.
    """
    ours, theirs = fake_device_of(gpus.process()), fake_device_of(gpus.process(), 1)
    if their_nccl is not None:
        theirs.process.nccl.number = their_nccl
    common = {"lanes": 2, "max_bytes": PIPE_BYTES, **options}
    near_options = {"device": ours.device, **common}
    far_options = {**common, "device": theirs.device, "digest": listens}
    async with (
        listen_pipe("tcp://127.0.0.1:0", **far_options) as listener,
        open_pipe(listener.url + url, **near_options) as near,
        await listener.accept() as far,
    ):
        if is_connected:
            await near.gpus_settled()
            await far.gpus_settled()
            expect(near.transport == far.transport == "nccl", "no way was opened")
        yield NcclPipes(near, far, ours, theirs)

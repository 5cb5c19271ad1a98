"""Both sides of a pipe, in two processes with a GPU each that are not there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from asynckv.errors import PeerLost
from asynckv.pipes.pipe import Pipe
from asynckv.sharing.gpu_channel import GpuLink
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pipe_pairs import GpuPipes, gpu_side_of, open_pipes_on

__all__ = ("NcclPipes", "open_nccl_pipes")


@dataclasses.dataclass(frozen=True)
class NcclPipes(GpuPipes):
    """What one side sends goes to the other's GPU by NCCL."""

    @property
    def near_way(self) -> GpuLink:
        """The near end of what connects both GPUs."""
        return _way_of(self.near)

    @property
    def far_way(self) -> GpuLink:
        """The far end of it."""
        return _way_of(self.far)

    @property
    def moved(self) -> int:
        """How many operations the near side has sent from GPU to GPU."""
        return self.near_way.transport.sender._sending._next

    def break_off(self, *, near: bool) -> None:
        way = self.near_way if near else self.far_way
        way._stalled(PeerLost("a test"))


def _way_of(pipe: Pipe) -> GpuLink:
    way = gpu_side_of(pipe).opening.agreed_link
    if way is None:
        raise LookupError("nothing connects both GPUs")
    return way


@contextlib.asynccontextmanager
async def open_nccl_pipes(
    gpus: FakeGpus,
    *,
    their_nccl: int | None = None,
    is_connected: bool = True,
    **options: Any,
) -> AsyncIterator[NcclPipes]:
    """Open a pipe between two of ``gpus``; ``options`` are of :func:`open_pipes_on`.

    ``their_nccl`` is the version that the listener has. Unless ``is_connected`` is
    false this waits until both GPUs are connected.
    """
    ours, theirs = fake_device_of(gpus.process()), fake_device_of(gpus.process(), 1)
    if their_nccl is not None:
        theirs.process.nccl.number = their_nccl
    expected = "nccl" if is_connected else None
    async with open_pipes_on(ours, theirs, expected=expected, **options) as pipes:
        yield NcclPipes(*pipes, ours, theirs)

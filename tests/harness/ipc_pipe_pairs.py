"""Both sides of a pipe, in two processes on GPUs that are not there, and in reach."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from asynckv.pipes.shared_memory import GpuSharing
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pipe_pairs import GpuPipes, gpu_side_of, open_pipes_on

__all__ = ("IpcPipes", "open_ipc_pipes")


@dataclasses.dataclass(frozen=True)
class IpcPipes(GpuPipes):
    """What one side has on the GPU the other may read where it lies."""

    @property
    def near_sharing(self) -> GpuSharing:
        """What the near side shows, and reads."""
        return gpu_side_of(self.near).sharing

    @property
    def far_sharing(self) -> GpuSharing:
        """What the far side shows, and reads."""
        return gpu_side_of(self.far).sharing

    @property
    def moved(self) -> int:
        """How many tensors the near side has shown to be read where they lie."""
        importer = self.near_sharing._importer
        return 0 if importer is None else importer._last_number

    def break_off(self, *, near: bool) -> None:
        sharing = self.near_sharing if near else self.far_sharing
        sharing.lose("a test")


@contextlib.asynccontextmanager
async def open_ipc_pipes(
    gpus: FakeGpus, *, theirs: int = 0, is_connected: bool = True, **options: Any
) -> AsyncIterator[IpcPipes]:
    """Open a pipe on the first of ``gpus``; ``options`` are of :func:`open_pipes_on`.

    ``theirs`` is the number of the listener's GPU. Unless ``is_connected`` is false
    this waits until both sides share their memory.
    """
    gpus.has_peer_access = gpus.has_peer_access or theirs > 0
    ours, far = fake_device_of(gpus.process()), fake_device_of(gpus.process(), theirs)
    expected = "cuda_ipc" if is_connected else None
    async with open_pipes_on(ours, far, expected=expected, **options) as pipes:
        yield IpcPipes(*pipes, ours, far)

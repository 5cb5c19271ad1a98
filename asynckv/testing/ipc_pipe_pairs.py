"""Both sides of a pipe, in two processes on one GPU that is not there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from asynckv.links.options import Digest
from asynckv.pipes.gpu_sharing import GpuSharing
from asynckv.pipes.opening import listen_pipe, open_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing.expectations import expect
from asynckv.testing.fake_devices import FakeDevice, fake_device_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.nccl_pipe_pairs import gpu_side_of, used_bytes_of
from asynckv.testing.pipe_checks.values import PIPE_BYTES

__all__ = ("IpcPipes", "open_ipc_pipes")


@dataclasses.dataclass(frozen=True)
class IpcPipes:
    """``near`` has dialled, from ``ours``; ``far`` has accepted, on ``theirs``."""

    near: Pipe
    far: Pipe
    ours: FakeDevice
    theirs: FakeDevice

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
        holder = self.near_sharing._holder
        return 0 if holder is None else holder._last_number

    @property
    def opened(self) -> int:
        """How many allocations the two processes have open of each other's."""
        return sum(len(gpu.process.cuda._opened) for gpu in (self.ours, self.theirs))

    @property
    def used_bytes(self) -> int:
        """What both pipes have of their memory of the GPU."""
        return sum(map(used_bytes_of, (self.near, self.far)))


@contextlib.asynccontextmanager
async def open_ipc_pipes(
    gpus: FakeGpus,
    *,
    url: str = "",
    listens: Digest = "auto",
    is_connected: bool = True,
    **options: Any,
) -> AsyncIterator[IpcPipes]:
    """Open a pipe on the first of ``gpus``; ``options`` are those of ``open_pipe``.

    ``url`` is the end of the URL that is dialled, ``listens`` the listener's digest.
    Unless ``is_connected`` is false this waits until both sides share their memory.
    """
    ours, theirs = fake_device_of(gpus.process()), fake_device_of(gpus.process())
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
            is_shared = near.transport == far.transport == "cuda_ipc"
            expect(is_shared, "no memory is shared")
        yield IpcPipes(near, far, ours, theirs)

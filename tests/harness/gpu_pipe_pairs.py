"""Both sides of a pipe, in two processes on GPUs that are not there."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from asynckv.errors import PeerLost
from asynckv.links.options import Digest
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.pipes.gpu_side import GpuSide
from asynckv.pipes.pipe import Pipe
from asynckv.pipes.shared_memory import GpuSharing
from asynckv.sharing.gpu_channel import GpuLink
from asynckv.tensors.paged_arena import PagedArena
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.testing.pipe_checks import LARGE, PIPE_BYTES
from harness.fake_devices import FakeDevice, fake_device_of
from harness.fake_gpus import FakeGpus

__all__ = (
    "GpuPipes",
    "IpcPipes",
    "NcclPipes",
    "arenas_of",
    "expect_by_host",
    "gpu_side_of",
    "open_ipc_pipes",
    "open_nccl_pipes",
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

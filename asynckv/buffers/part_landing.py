"""Where bytes land that come over a socket, and how they get to their GPU."""

from __future__ import annotations

from collections.abc import Sequence

from asynckv.errors import ChecksumError
from asynckv.tensors.arena import Region
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.runs import Memory, fill
from asynckv.tensors.views import bytes_of
from asynckv.types import TensorSpec

__all__ = ("PartLanding", "lift_landed", "on_gpu")


class PartLanding:
    """The way of one part into its region: straight, or by a copy in host memory."""

    def __init__(self, region: Region, spec: TensorSpec, pool: CopyPool) -> None:
        self.spec = spec
        self._region = region
        self._copy = pool.host_empty(spec) if region.is_on_device else None

    @property
    def is_to_be_lifted(self) -> bool:
        """Is what lands here still to be brought to a GPU?"""
        return self._copy is not None

    @property
    def memory(self) -> Memory:
        """Memory of the host, as large as the part."""
        if self._copy is None:
            return self._region.memory()
        return bytes_of(self._copy)

    def fill(self, piece: memoryview) -> None:
        """Let bytes land that have come with a frame: at most 64 KiB. Never waits."""
        fill(self.memory, piece)


async def lift_landed(
    landings: Sequence[PartLanding], digests: Sequence[bytes], pool: CopyPool
) -> None:
    """Bring to the GPU what has landed for it, whole; nothing is done to the others.

    ``digests`` are those of what has come, empty where nobody digests. A cancelled call
    ends when the GPU is done.

    :raises ChecksumError: it has changed in this process's memory
    """
    lifted = [i for i, landing in enumerate(landings) if landing.is_to_be_lifted]
    if not lifted:
        return
    copies = [x._copy for i in lifted if (x := landings[i])._copy is not None]
    places = [landings[i]._region.place(landings[i].spec) for i in lifted]
    copying = pool.copy(copies, places)
    del copies, places  # an error's traceback would keep the memory in use
    for i, found in zip(lifted, await copying, strict=True):
        if digests[i] and found != digests[i]:
            raise ChecksumError("what came changed on its way to the GPU")


def on_gpu(region: Region, spec: TensorSpec) -> DeviceMemory:
    """Return the memory of a GPU that a region is in; whoever has it keeps it."""
    place = region.place(spec)
    if not isinstance(place, DeviceMemory):
        raise TypeError("a region of a GPU lies elsewhere")
    return place

"""What a peer is sent of a GPU: read there when it leaves, not before.

So one piece is brought to the host while the last one is on the wire, and what waits
for room at the peer takes no memory of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asynckv.buffers.gpu_staging import GpuStaging, Source, StagedTensor
from asynckv.buffers.hoisting import OnGpu
from asynckv.buffers.manifest import INLINE_NBYTES
from asynckv.links.riding import rides
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.views import empty_tensor
from asynckv.types import TensorSpec

__all__ = ("SourceOnGpu", "gpu_source", "until_made")

_FIRST_NBYTES: Final = 64


class SourceOnGpu(OnGpu):
    """A source as whoever hoists it sees it."""

    def __init__(self, source: StagedTensor | KVOnGpu) -> None:
        self._source = source

    def place(self, spec: TensorSpec) -> DeviceMemory | KVOnGpu:
        source = self._source
        return source.place() if isinstance(source, StagedTensor) else source


async def gpu_source(
    memory: KVMemory | KVOnGpu, staging: GpuStaging | None, nbytes: int
) -> StagedTensor | KVOnGpu | None:
    """Return what can be read on a GPU when it leaves, of a request of ``nbytes``.

    That is a copy on this side's GPU, if there is ``staging`` with room, or the
    caller's own memory. ``None`` stands for what has to be in the host's: what rides,
    and what is not on a GPU or in blocks there.

    :raises GPUFailed: the GPU failed
    """
    if nbytes <= INLINE_NBYTES or rides(memory.nbytes):
        return None
    staged = None if staging is None else await staging.staged(memory)
    if staged is None and isinstance(memory, KVOnGpu):
        return memory
    return staged


async def until_made(sources: Sequence[Source], pool: CopyPool) -> None:
    """Wait until the caller's stream has made what is read where it lies.

    A peer that has granted memory gives up whoever sends nothing for long. A cancelled
    call ends when no GPU is read.

    :raises GPUUnavailable: CuPy, a driver or a GPU is missing
    :raises GPUFailed: the GPU failed
    """
    made = [source for source in sources if isinstance(source, KVOnGpu)]
    if not made:
        return
    firsts = [one.part(0, min(one.nbytes, _FIRST_NBYTES)) for one in made]
    targets = [empty_tensor(one.spec) for one in firsts]
    copying = pool.copy(firsts, targets, digest=False)
    del sources, made, firsts  # an error's traceback would keep the memory in use
    await copying

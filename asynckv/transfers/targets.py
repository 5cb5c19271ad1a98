"""Where the bytes of what comes belong: memory of the host, or of a GPU.

What comes through memory of the host for a GPU lands in a bounce buffer there, and is
copied from it. Some of the memory is what the caller named in ``into=``.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from asynckv.devices.arena import place_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError, GPUFailed
from asynckv.observability.lines import as_line
from asynckv.tensors.arena import Region
from asynckv.tensors.blocks import KVMemory, check_apart, check_landing, landing_of
from asynckv.tensors.runs import Memory, fill
from asynckv.tensors.views import bytes_of
from asynckv.transfers.manifest import check_names, names_in
from asynckv.types import TensorSpec

__all__ = (
    "DeviceTarget",
    "HostTarget",
    "Part",
    "Target",
    "TensorTarget",
    "check_targets",
    "copy_to_device",
    "device_memory",
    "fill_targets",
    "match_targets",
    "target_in",
)


class Target(abc.ABC):
    """Where the bytes of one part belong."""

    __slots__ = ("nbytes",)

    nbytes: int

    @property
    @abc.abstractmethod
    def is_on_device(self) -> bool:
        """Is it memory of a GPU?"""

    @abc.abstractmethod
    def host(self) -> Memory:
        """Return memory of the host that the bytes can land in. Never waits.

        That of a GPU's target is to be copied there: see :func:`copy_to_device`.
        """

    @abc.abstractmethod
    def device(self) -> DeviceMemory:
        """Return the memory of a GPU; whoever has it keeps it."""

    def give_up(self, error: GPUFailed) -> None:
        """A GPU may write for ever where this is: use other memory, or raise.

        :raises GPUFailed: there is no other
        """
        raise GPUFailed(error.message) from error


class HostTarget(Target):
    """Memory of the host."""

    __slots__ = ("_memory",)

    is_on_device: ClassVar[bool] = False

    def __init__(self, memory: Memory) -> None:
        self.nbytes = memory.nbytes
        self._memory = memory

    def host(self) -> Memory:
        return self._memory

    def device(self) -> DeviceMemory:
        raise TypeError("memory of the host is on no GPU")


class DeviceTarget(Target):
    """Memory of a GPU, with a bounce buffer before it that ``empty`` makes.

    ``pool`` copies from there, and digests what it copies once more if it
    ``is_digested``.
    """

    __slots__ = ("_bounce", "_empty", "is_digested", "pool", "spec")

    is_on_device: ClassVar[bool] = True

    def __init__(
        self,
        spec: TensorSpec,
        pool: CopyPool,
        *,
        empty: Callable[[TensorSpec], torch.Tensor],
        is_digested: bool = True,
    ) -> None:
        self.nbytes = spec.nbytes
        self.spec = spec
        self.pool = pool
        self.is_digested = is_digested
        self._empty = empty
        self._bounce: torch.Tensor | None = None

    @abc.abstractmethod
    def place(self) -> KVMemory | DeviceMemory | None:
        """Return the memory of the GPU; ``None`` if nobody needs it any more."""

    @property
    def is_in_host(self) -> bool:
        """Do the bytes land in the bounce buffer?"""
        return self._bounce is not None

    def host(self) -> Memory:
        if self._bounce is None:
            self._bounce = self._empty(self.spec)
        return bytes_of(self._bounce)

    def take_bounce(self) -> torch.Tensor | None:
        """Return the bounce buffer, and keep it no longer."""
        bounce, self._bounce = self._bounce, None
        return bounce


@dataclasses.dataclass(slots=True)
class Part:
    """One tensor of a buffer's entry. ``digest`` is set when it has landed.

    It has no region before there is room, nor when the entry has left.
    """

    name: str
    spec: TensorSpec
    region: Region | None = None
    digest: bytes | None = None


class _RegionTarget(DeviceTarget):
    """Memory of a buffer on a GPU, for as long as the entry is there."""

    __slots__ = ("_part",)

    def __init__(self, part: Part, pool: CopyPool) -> None:
        super().__init__(part.spec, pool, empty=pool.host_empty)
        self._part = part

    def place(self) -> DeviceMemory | None:
        region = self._part.region
        return None if region is None else device_memory(region, self.spec)

    def device(self) -> DeviceMemory:
        return device_memory(self._part.region, self.spec)


class TensorTarget(DeviceTarget):
    """A tensor of a GPU, or blocks there: the caller's, or one that is made for it."""

    __slots__ = ("_into", "_is_callers", "_ready")

    def __init__(
        self,
        spec: TensorSpec,
        into: KVMemory | None,
        pool: CopyPool,
        *,
        empty: Callable[[TensorSpec], torch.Tensor],
    ) -> None:
        super().__init__(spec, pool, empty=empty, is_digested=False)
        self._into = into
        self._is_callers = into is not None
        self._ready: DeviceMemory | None = None

    def place(self) -> KVMemory:
        if self._into is None:
            self._into = self.pool.empty(self.spec)
        return self._into

    def ready(self, memory: DeviceMemory) -> None:
        """Nothing is queued any more for the ``memory`` of the place."""
        self._ready = memory

    def device(self) -> DeviceMemory:
        memory, self._ready = self._ready, None
        if memory is None:
            raise TypeError("what is to be on a GPU is not ready there")
        return memory

    def give_up(self, error: GPUFailed) -> None:
        if self._is_callers:
            super().give_up(error)
        self._into = None


def target_in(region: Region, part: Part, pool: CopyPool) -> Target:
    """Return a part's ``region`` as what its bytes are to land in.

    :raises EntryTooLarge: of the heap, and the process may have no more
    """
    if region.is_on_device:
        return _RegionTarget(part, pool)
    return HostTarget(region.memory())


def device_memory(region: Region | None, spec: TensorSpec) -> DeviceMemory:
    """Return the memory of a GPU that a region is in; whoever has it keeps it."""
    place = None if region is None else place_of(region, spec)
    if not isinstance(place, DeviceMemory):
        raise TypeError("a region of a GPU lies elsewhere")
    return place


async def copy_to_device(
    targets: Sequence[DeviceTarget], digests: Sequence[bytes]
) -> None:
    """Bring what has landed in bounce buffers to the GPU.

    ``digests`` are those of what has come, empty where nobody digests. A cancelled call
    ends when the GPU is done.

    :raises ChecksumError: it has changed in this process's memory
    :raises GPUFailed: the GPU failed
    """
    bounces, due = list[torch.Tensor](), list[bytes]()
    places = list[KVMemory | DeviceMemory]()
    for target, digest in zip(targets, digests, strict=True):
        bounce, place = target.take_bounce(), target.place()
        if bounce is not None and place is not None:
            bounces.append(bounce)
            places.append(place)
            due.append(digest if target.is_digested else b"")
    if not places:
        return
    copying = targets[0].pool.copy(bounces, places, digest=any(due))
    # An error's traceback would keep the memory in use.
    bounce, place = None, None
    del bounces, places
    for found, digest in zip(await copying, due, strict=True):
        if digest and found != digest:
            raise ChecksumError("what came changed on its way to the GPU")


async def fill_targets(
    targets: Sequence[Target], pieces: Sequence[memoryview], digests: Sequence[bytes]
) -> None:
    """Let bytes land that have come with a frame: at most 64 KiB each.

    Waits for a GPU alone; a cancelled call ends when that is done.

    :raises ChecksumError: as :func:`copy_to_device`
    :raises GPUFailed: as :func:`copy_to_device`
    """
    for target, piece in zip(targets, pieces, strict=True):
        fill(target.host(), piece)
    on_device = [t for t in targets if isinstance(t, DeviceTarget)]
    if on_device:
        every = zip(targets, digests, strict=True)
        await copy_to_device(on_device, [d for t, d in every if t.is_on_device])


def check_targets(into: Mapping[str, KVMemory] | None) -> Mapping[str, KVMemory]:
    """Refuse memory that nothing can land in, before anything is waited for.

    :raises ValueError: a name that no entry has, or memory that is not plain CPU
        memory or a GPU's, contiguous or in contiguous rows; or two of them share memory
    :raises TypeError: no mapping of names to memory
    """
    if into is None:
        return {}
    if not isinstance(into, Mapping):
        raise TypeError(
            f"into maps a tensor's name to its memory; it is a {type(into).__name__}"
        )
    if not into:
        return {}
    check_names(into)
    found: dict[str, KVMemory] = {}
    for name, memory in into.items():
        if not isinstance(memory, KVMemory):
            raise TypeError(
                f"into[{name!r}] is a {type(memory).__name__}, not a tensor or KVBlocks"
            )
        try:
            found[name] = landing_of(memory)
        except ValueError as exc:
            raise ValueError(f"into[{name!r}]: {exc}") from None
    check_apart(found)
    return found


def match_targets(
    specs: Mapping[str, TensorSpec], targets: Mapping[str, KVMemory]
) -> None:
    """Compare ``into`` with the entry that was selected.

    :raises ValueError: a name the entry does not have, another shape or dtype
    """
    for name, memory in targets.items():
        if name not in specs:
            raise ValueError(
                f"into[{name!r}]: the entry has no such tensor; it has "
                f"{as_line(names_in(specs)) or 'none'}"
            )
        check_landing(memory, specs[name], name)

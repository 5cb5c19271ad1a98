"""One offer of a peer and what has come of it: from its manifest to an entry.

What came through host memory is brought to the GPU where it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import torch

from asynckv.abc import KVEntry
from asynckv.devices.copying import CopyPool
from asynckv.devices.growth import Growth
from asynckv.devices.tensors import gpu_of
from asynckv.errors import EntryTooLarge
from asynckv.protocol.frames import Offer
from asynckv.protocol.values import Place
from asynckv.protocol.wire import digest_of
from asynckv.sharing.mappings import MappedPin
from asynckv.tensors.blocks import KVBlocks, KVMemory, tensor_at
from asynckv.tensors.runs import fill
from asynckv.tensors.views import memory_of, tensor_from, tensor_in
from asynckv.transfers.incoming import Incoming
from asynckv.transfers.manifest import INLINE_NBYTES, Manifest, unflatten, verify
from asynckv.transfers.targets import match_targets
from asynckv.types import TensorSpec
from asynckv.waits.waiting import ByteRoom, clear_all_frames

__all__ = (
    "Delivery",
    "MappedParts",
    "ReceiveBudget",
    "SmallTensors",
    "goes_to_gpu",
    "is_on_gpu",
    "move_to_device",
    "moved_to_device",
    "on_host",
)


_MOST_SHAPES: Final = 8
_MOST_NBYTES: Final = 16 * 1024


class SmallTensors:
    """The next few small tensors, made while their bytes are waited for.

    Of the shapes of the last ones: after a wake-up each call of torch takes long.
    """

    def __init__(self) -> None:
        self._made: dict[TensorSpec, tuple[torch.Tensor, memoryview] | None] = {}

    def prepare(self) -> None:
        """Make one of each shape that was asked for lately, if it was taken."""
        for spec, made in self._made.items():
            if made is None:
                raw = bytearray(spec.nbytes)
                self._made[spec] = tensor_in(raw, spec), memoryview(raw)

    def tensor(self, piece: bytes | memoryview, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor of its own memory that holds a copy of ``piece``."""
        made = self._made.get(spec)
        if made is not None:
            self._made[spec] = None
            tensor, view = made
            view[:] = piece
            return tensor
        if 0 < len(piece) <= _MOST_NBYTES and spec.dtype != "complex32":
            if len(self._made) >= _MOST_SHAPES:
                self._made.clear()
            self._made[spec] = None
        return tensor_from(piece, spec)


class ReceiveBudget(ByteRoom):
    """Bytes, first come, first served, and the ``memory`` of as many for them."""

    def __init__(self, max_bytes: int, memory: Growth | None = None) -> None:
        super().__init__(
            max_bytes,
            who="a delivery",
            what=f"room in the receive bound of {max_bytes} bytes",
            ends_with="the end of another drop_select or get",
        )
        self._memory = memory or Growth(max_bytes)
        self.empty = self._memory.spares.spare
        """Return a tensor, of such a spec, for some of the bytes that were reserved."""
        self.small = SmallTensors()

    async def reserve(self, nbytes: int, *, in_host: bool = True) -> None:
        """Take ``nbytes``, waiting behind those who asked before.

        Also waits for slabs that are under way, if they are needed for so much
        ``in_host`` memory.

        A cancelled call leaves no trace.

        :raises EntryTooLarge: ``nbytes`` exceeds the bound
        """
        if nbytes > self.max_bytes:
            raise EntryTooLarge(
                nbytes=nbytes,
                max_bytes=self.max_bytes,
                hint="raise connect(max_bytes=...) or pass into=",
            )
        await self.take(nbytes)
        if not in_host:
            return
        try:
            await self._memory.reach(nbytes)
        except BaseException:
            self.release(nbytes)
            raise


class MappedParts(msgspec.Struct, eq=False):
    """Where the parts of one offer lie, checked, and who keeps them there."""

    places: Sequence[Place | None]
    sizes: Sequence[int]
    edges: bytes
    pin: MappedPin | None

    def release(self) -> None:
        """Only views keep them there from now on."""
        self.pin = None


class Delivery(msgspec.Struct, eq=False):
    """One offer and what has come of it. Nothing here waits for anybody.

    ``landed`` names those of its ``tensors`` that are verified, in the order in
    which they came. ``charged_bytes`` is what the receive bound holds for it. What
    is ``mapped`` lies in memory of the peer.
    """

    offer: Offer
    manifest: Manifest
    mapped: MappedParts | None = None
    has_completed: bool = False
    landed: list[str] = []
    tensors: dict[str, torch.Tensor] = {}
    incoming: Incoming | None = None
    charged_bytes: int = 0
    tensor_from: Callable[[bytes | memoryview, TensorSpec], torch.Tensor] = tensor_from

    def __repr__(self) -> str:
        # Of no token and no tensor: reading one of a GPU would wait for that.
        return (
            f"<Delivery {self.offer.transfer} of {self.manifest.layout.nbytes} bytes>"
        )

    @property
    def is_complete(self) -> bool:
        """The entry is committed, be it since its offer or before it."""
        return self.offer.complete or self.has_completed

    @property
    def is_whole(self) -> bool:
        """Every part is verified and the entry committed."""
        is_complete = self.offer.complete or self.has_completed
        return is_complete and len(self.landed) == len(self.manifest.digests)

    @property
    def is_small(self) -> bool:
        """Small enough for an acknowledgement that is not waited for."""
        return self.offer.inline or self.manifest.layout.nbytes <= INLINE_NBYTES

    def read_inline(self, targets: Mapping[str, KVMemory]) -> None:
        """Verify what rode with the offer, and copy it to memory of its own, or to
        ``targets`` in memory of the host: see :func:`move_to_device`.

        :raises ChecksumError: some bytes changed on their way
        :raises ValueError: ``targets`` do not fit the entry
        """
        manifest = self.manifest
        if targets:
            targets = on_host(targets)
            match_targets(manifest.layout.specs, targets)
        specs, digests = manifest.layout.specs, manifest.digests
        every = zip(specs.items(), digests, manifest.inline, strict=True)
        for (name, spec), digest, piece in every:
            if digest and digest != (found := digest_of(piece)):
                verify(name, digest, found)
            if name in targets:
                target = targets[name]
                fill(memory_of(target), piece)  # at most 64 KiB
                self.tensors[name] = tensor_at(target)
            else:
                self.tensors[name] = self.tensor_from(piece, spec)
        self.landed = [*self.tensors]

    def own_nbytes(self, targets: Mapping[str, KVMemory]) -> int:
        """Return how many bytes need memory of their own.

        :raises ValueError: ``targets`` do not fit the entry
        """
        specs = self.manifest.layout.specs
        match_targets(specs, targets)
        return sum(spec.nbytes for name, spec in specs.items() if name not in targets)

    def land(self, tensors: dict[str, torch.Tensor]) -> None:
        """All of it is there: the peer's memory is kept by views of it alone."""
        self.tensors = tensors
        self.landed = [*tensors]
        self.mapped = None

    def forget(self) -> None:
        """Keep no tensor alive: they were handed out."""
        self.tensors = {}
        self.release()

    def release(self) -> None:
        """Nothing more is read in the peer's memory, whoever keeps this object."""
        if self.mapped is not None:
            self.mapped.release()
            self.mapped = None

    def uncharge(self, budget: ReceiveBudget) -> None:
        """Give what it was charged with back, once."""
        if self.charged_bytes:
            budget.release(self.charged_bytes)
            self.charged_bytes = 0

    def entry(self) -> KVEntry:
        """Return the entry, whole."""
        offer, manifest = self.offer, self.manifest
        tokens, roi = manifest.input_tokens, manifest.roi
        tensors = self.tensors  # in the order in which they came
        if len(tensors) > 1:
            tensors = {name: tensors[name] for name in manifest.layout.specs}
        key, value, hidden, extras = unflatten(tensors.items())
        return KVEntry(
            None if tokens is None else self.tensor_from(tokens.data, tokens.spec),
            None if roi is None else self.tensor_from(roi.data, roi.spec),
            key,
            value,
            hidden,
            extras,
            entry_id=offer.entry_id,
            matched_tokens=offer.matched_tokens,
            attempt=offer.attempt,
        )


def on_host(targets: Mapping[str, KVMemory]) -> dict[str, KVMemory]:
    """Return those in which bytes can land that come over a socket."""
    return {name: target for name, target in targets.items() if not is_on_gpu(target)}


async def move_to_device(
    delivery: Delivery, targets: Mapping[str, KVMemory], pool: CopyPool
) -> None:
    """Let all that came along, or was read, be where it is wanted: copied to a GPU.

    That is in ``targets``, or on the GPU of ``pool``, if it has one. What it had of the
    host's memory is let go. A cancelled call ends when no target is written any more.
    After that, and after an error, the delivery keeps no tensor.

    :raises ValueError: ``targets`` do not fit the entry
    """
    if not targets and not goes_to_gpu(None, pool):
        return
    try:
        match_targets(delivery.manifest.layout.specs, targets)
        names = [
            name
            for name, tensor in delivery.tensors.items()
            if gpu_of(tensor) is None and goes_to_gpu(targets.get(name), pool)
        ]
        if names:
            places = await _copied(delivery, names, targets, pool)
            delivery.tensors |= dict(zip(names, places, strict=True))
    except BaseException as exc:
        clear_all_frames(exc)  # they keep the peer's memory in use
        delivery.forget()
        raise


async def moved_to_device(
    delivery: Delivery, name: str, targets: Mapping[str, KVMemory], pool: CopyPool
) -> torch.Tensor:
    """As :func:`move_to_device`, of one tensor that has landed."""
    tensor = delivery.tensors[name]
    if gpu_of(tensor) is not None or not goes_to_gpu(targets.get(name), pool):
        return tensor
    (tensor,) = await _copied(delivery, [name], targets, pool)
    return tensor


async def _copied(
    delivery: Delivery,
    names: list[str],
    targets: Mapping[str, KVMemory],
    pool: CopyPool,
) -> list[torch.Tensor]:
    specs = delivery.manifest.layout.specs
    places = [
        targets[name] if name in targets else pool.empty(specs[name]) for name in names
    ]
    # No list of them here: an error's traceback would keep the peer's memory in use.
    await pool.copy([delivery.tensors[n] for n in names], places, digest=False)
    return [tensor_at(place) for place in places]


def goes_to_gpu(target: KVMemory | None, pool: CopyPool) -> bool:
    """Does a tensor with this ``into=``, or none, belong on a GPU?"""
    if target is None:
        return pool.device is not None
    return is_on_gpu(target)


def is_on_gpu(target: KVMemory) -> bool:
    """Does it lie in memory of a GPU?"""
    return gpu_of(target.pool if isinstance(target, KVBlocks) else target) is not None

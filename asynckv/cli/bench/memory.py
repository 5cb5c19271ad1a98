"""Memory that payload comes from and lands in, made once a case and then reused."""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Sequence

import numpy
import torch

from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.tensors.views import bytes_of

__all__ = ("Memory", "WrongBytes", "copy_all", "make_memory")

_MARKS = 251
_POISON = 255


class WrongBytes(Exception):
    """What landed is not what was sent."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """``parts`` tensors to send and as many places, in bytes and as tensors.

    ``paged`` is both where they are blocks of a cache: one tensor to asynckv.
    """

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    paged: tuple[KVBlocks, KVBlocks] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that one transfer moves."""
        return sum(source.nbytes for source in self.sources)

    @functools.cached_property
    def layers(self) -> dict[str, KVMemory]:
        """The sources as ``insert`` takes them for its key."""
        if self.paged is not None:
            return {"0": self.paged[0]}
        return {str(index): source for index, source in enumerate(self.sources)}

    @functools.cached_property
    def into(self) -> dict[str, KVMemory]:
        """The targets as ``drop_select`` takes them."""
        if self.paged is not None:
            return {"0.key": self.paged[1]}
        return {f"{index}.key": target for index, target in enumerate(self.targets)}

    @property
    def source_views(self) -> list[memoryview]:
        """The sources, for sockets and copies."""
        return [bytes_of(source) for source in self.sources]

    @property
    def target_views(self) -> list[memoryview]:
        """The targets, for sockets and copies."""
        return [bytes_of(target) for target in self.targets]

    def poison(self) -> None:
        """Fill the targets with what no source holds."""
        for target in self.targets:
            target.fill_(_POISON)

    def check(self) -> None:
        """Compare both ends and the middle of every target with its source.

        :raises WrongBytes: they differ
        """
        for index, target in enumerate(self.targets):
            places = (0, target.numel() // 2, -1)
            if any(int(target[place]) != index % _MARKS for place in places):
                raise WrongBytes(f"wrong bytes in tensor {index}")


def make_memory(parts: int, nbytes: int, *, scattered: bool = False) -> Memory:
    """Return touched memory. Blocks for as long as that takes.

    ``scattered`` ones lie at either end in a pool of twice the size in random
    order, as the blocks of a paged cache do.
    """
    if not scattered:
        sources = [
            torch.full((nbytes,), index % _MARKS, dtype=torch.uint8)
            for index in range(parts)
        ]
        targets = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(parts)]
        return Memory(sources, targets)
    here, there = (_paged(parts, nbytes, seed) for seed in (0, 1))
    for index, place in enumerate(here.block_ids.tolist()):
        here.pool[place] = index % _MARKS
    sources, targets = (
        [blocks.pool[place] for place in blocks.block_ids.tolist()]
        for blocks in (here, there)
    )
    return Memory(sources, targets, (here, there))


def _paged(parts: int, nbytes: int, seed: int) -> KVBlocks:
    pool = torch.zeros((2 * parts, nbytes), dtype=torch.uint8)
    return KVBlocks(pool, random.Random(seed).sample(range(2 * parts), parts))


def copy_all(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> float:
    """Copy part by part in this thread; return the seconds. Releases the GIL."""
    pairs = [
        (numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))
        for target, source in zip(targets, sources, strict=True)
    ]
    began_s = time.perf_counter()
    for target, source in pairs:
        numpy.copyto(target, source)
    return time.perf_counter() - began_s

"""What a value of a store is in bytes: some blocks of all layers, one behind the other.

They are copied in threads, to host memory and back, wherever the caches are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy
import numpy.typing
import torch

from asynckv.abc import BlockIds
from asynckv.connectors.caches import BlockMoves
from asynckv.devices.cuda import Event
from asynckv.devices.tensors import gpu_of
from asynckv.tensors.blocks import KVBlocks, extent_of
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.views import bytes_of

__all__ = ("PackedBlocks",)

_MARK_NBYTES: Final = 64
"""The digest's. What follows it is aligned for every dtype."""
_PIECE_NBYTES: Final = 2**20


_Into: TypeAlias = Literal["value", "blocks"]
_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class _HostPool(NamedTuple):
    """One pool of blocks in host memory, and where its part of a value begins."""

    group: int
    memory: _Bytes
    num_blocks: int
    step: int
    block_nbytes: int
    start: int


class _HostCopy(CopyJob):
    """Blocks of every pool, copied to the value they make up, or from it.

    They are the value's own from ``first`` on.

    :raises IndexError: there is no block of that id
    :raises ValueError: a block that is to be written is there twice
    """

    def __init__(
        self,
        pools: Sequence[_HostPool],
        ids: BlockIds,
        value: _Bytes,
        first: int,
        into: _Into,
    ) -> None:
        for pool in pools:
            some = ids[pool.group]
            if some and not 0 <= min(some) <= max(some) < pool.num_blocks:
                raise IndexError(f"a pool has {pool.num_blocks} blocks: no such id")
            if into == "blocks" and len(set(some)) < len(some):
                raise ValueError("a block is there twice: what should land in it?")
        self._pools, self._ids, self._value = pools, ids, value
        self._first, self._is_gathering = first, into == "value"

    @property
    def nbytes(self) -> int:
        return sum(len(self._ids[one.group]) * one.block_nbytes for one in self._pools)

    def steps(self) -> Generator[None, None, None]:
        copied = 0
        for pool in self._pools:
            nbytes = pool.block_nbytes
            start = pool.start + self._first * nbytes
            for block_id in self._ids[pool.group]:
                first = block_id * pool.step
                block = pool.memory[first : first + nbytes]
                part = self._value[start : start + nbytes]
                if self._is_gathering:
                    part[:] = block
                else:
                    block[:] = part
                start += nbytes
                copied += nbytes
                if copied >= _PIECE_NBYTES:
                    copied = 0
                    yield


class PackedBlocks:
    """Gathers ``num_blocks`` blocks from every layer's pools, and scatters them.

    What they are in bytes is the order of the layers, of the pools of each, and of the
    blocks of that pool, after a digest of what pools are: their names, dtypes and
    shapes.
    """

    def __init__(self, moves: BlockMoves, num_blocks: int = 1) -> None:
        caches = moves.caches
        self.moves = moves
        self.num_blocks = num_blocks
        pools = [
            (layer, pool) for layer in caches.layers for pool in caches.pools(layer)
        ]
        none = [(layer, KVBlocks(pool, ())) for layer, pool in pools]
        told = [(layer, one.spec.dtype, one.spec.shape[1:]) for layer, one in none]
        digest = hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=_MARK_NBYTES)
        self._mark = digest.digest()
        self._pools: list[tuple[int, KVBlocks, int]] = []
        """The group of each, none of its blocks, and where its part of a value is."""
        self.nbytes = _MARK_NBYTES
        """Of a value."""
        for layer, one in none:
            self._pools.append((caches.group_of(layer), one, self.nbytes))
            self.nbytes += one.block_nbytes * num_blocks
        self._host = None if moves.is_on_gpu else list(self._in_host_memory())
        kinds = {(one.dtype, one.shape[1:]) for _, one in none}
        self._kind = kinds.pop() if len(kinds) == 1 else None
        """What all are, if that is the same."""

    async def gather(
        self, block_ids: BlockIds, mark: Event | None = None
    ) -> torch.Tensor:
        """Return the bytes of these blocks of each group, as they are at ``mark``.

        A cancelled call no longer reads the blocks.

        :raises ValueError: a group has not as many as a value
        """
        self._check(block_ids, 0)
        value = torch.empty(self.nbytes, dtype=torch.uint8)
        memory = bytes_of(value)
        memory[:_MARK_NBYTES] = self._mark
        if self._host is not None:
            await self._copy_on_host(memory, block_ids, 0, "value")
            return value
        parts = self._parts(value, block_ids, 0)
        await self.moves.gather(
            [blocks for blocks, _ in parts], [part for _, part in parts], mark
        )
        return value

    async def scatter(
        self,
        value: torch.Tensor,
        block_ids: BlockIds,
        first: int = 0,
        mark: Event | None = None,
    ) -> None:
        """Put a value's blocks from ``first`` on into these blocks of each group.

        The value is in host memory, or on the GPU of the blocks, and ready there.
        A cancelled call no longer writes to the blocks; they may hold a part.

        :raises ValueError: it is no value of these caches, or has not as many blocks,
            or a block is there twice
        """
        self._check(block_ids, first)
        if value.dtype != torch.uint8 or value.nbytes != self.nbytes:
            raise ValueError(
                f"{value.nbytes} bytes are no value of {self.num_blocks} blocks: that "
                f"has {self.nbytes}"
            )
        (told,) = await self.moves.fetch([value[:_MARK_NBYTES]])
        if bytes_of(told).tobytes() != self._mark:
            raise ValueError("a value of other layers, or of another dtype or layout")
        if self._host is not None:
            await self._copy_on_host(bytes_of(value), block_ids, first, "blocks")
            return
        parts = self._parts(value, block_ids, first)
        await self.moves.scatter(
            [part for _, part in parts], [blocks for blocks, _ in parts], mark
        )

    def _in_host_memory(self) -> Iterator[_HostPool]:
        for group, none, start in self._pools:
            pool, nbytes = none.pool, none.block_nbytes
            memory = numpy.frombuffer(extent_of(pool), numpy.uint8)
            step = pool.stride(0) * pool.element_size()
            yield _HostPool(group, memory, len(pool), step, nbytes, start)

    async def _copy_on_host(
        self,
        value: memoryview,
        block_ids: BlockIds,
        first: int,
        into: _Into,
    ) -> None:
        array = numpy.frombuffer(value, numpy.uint8)
        job = _HostCopy(self._host or (), block_ids, array, first, into)
        await self.moves.pool.run([job])

    def _parts(
        self, value: torch.Tensor, block_ids: BlockIds, first: int
    ) -> Sequence[tuple[KVBlocks, torch.Tensor]]:
        """Return each pool's blocks, and where in the value they are."""
        if gpu_of(value) is None:
            bytes_of(value)  # it is plain memory, whoever made it
        some = [none.at(block_ids[group]) for group, none, _ in self._pools]
        if self._kind is not None:  # a hundred layers one by one take a millisecond
            dtype, shape = self._kind
            of_all = (len(some), self.num_blocks, *shape)
            typed = value[_MARK_NBYTES:].view(dtype).view(of_all)[:, first:]
            return [(blocks, typed[i]) for i, blocks in enumerate(some)]
        parts = []
        for blocks, (_, _, start) in zip(some, self._pools, strict=True):
            start += first * blocks.block_nbytes
            part = value[start : start + blocks.nbytes]
            parts.append((blocks, part.view(blocks.dtype).view(blocks.shape)))
        return parts

    def _check(self, block_ids: BlockIds, first: int) -> None:
        for group in block_ids:
            if len(group) != self.num_blocks - first:
                raise ValueError(
                    f"{len(group)} blocks of a group for those from {first} on of a "
                    f"value of {self.num_blocks}"
                )

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import pytest
import torch

from asynckv.tensors.blocks import (
    KVBlocks,
    KVMemory,
    check_apart,
    check_landing,
    landing_of,
    memory_of,
    rows_of,
    spec_in,
    tensor_at,
)
from asynckv.tensors.runs import Runs, joined
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.types import TensorSpec

_IDS = [5, 0, 1, 2, 7]


def _pools() -> dict[str, torch.Tensor]:
    cache = torch.arange(2 * 8 * 4 * 3).view(2, 8, 4, 3)
    return {
        "a pool of its own": cache[0].clone(),
        "keys before values": cache[1],
        "keys beside values": cache.transpose(0, 1).contiguous()[:, 1],
        "bfloat16": cache[0].to(torch.bfloat16),
        "float8": cache[0].to(torch.float8_e5m2),
        "one element a block": torch.arange(8),
        "gradients": cache[0].float().requires_grad_(),
    }


def test_one_block_of_the_same_pool_is_what_indexing_would_copy() -> None:
    pool = torch.arange(24).view(4, 3, 2)
    one = KVBlocks(pool, ()).at(2)
    assert one.shape == (1, 3, 2) and one.nbytes == 48
    assert bytes(joined(one.memory())) == pool[2].numpy().tobytes()
    for absent in (-1, 4):
        with pytest.raises(IndexError, match="outside of the pool's 4"):
            one.at(absent)


@pytest.mark.parametrize("name", _pools())
@pytest.mark.parametrize("ids", [[], [3], _IDS, [2, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_blocks_are_what_indexing_would_copy(name: str, ids: list[int]) -> None:
    pool = _pools()[name]
    blocks, copy = (
        KVBlocks(pool, ids),
        pool.detach()[torch.tensor(ids, dtype=torch.long)],
    )
    assert joined(memory_of(blocks)) == bytes_of(copy)
    assert spec_in(blocks) == spec_of(copy)
    assert (blocks.shape, blocks.dtype, len(blocks)) == (
        copy.shape,
        copy.dtype,
        len(ids),
    )
    assert blocks.nbytes == copy.nbytes
    assert tensor_at(blocks) is pool


def test_ids_may_be_a_tensor() -> None:
    pool = torch.arange(8)
    assert bytes(joined(memory_of(KVBlocks(pool, torch.tensor([1, 7]))))) == bytes(
        bytes_of(torch.tensor([1, 7]))
    )


def test_blocks_that_follow_each_other_are_one_run() -> None:
    memory = memory_of(KVBlocks(torch.zeros(8, 16), [4, 5, 6, 1, 2]))
    assert isinstance(memory, Runs)
    assert len(memory) == 2
    assert isinstance(memory_of(KVBlocks(torch.zeros(8, 16), [4, 5])), memoryview)


@pytest.mark.parametrize("ids", [[8], [-1], torch.tensor([0, 99])])
def test_a_block_that_is_not_there_is_an_error(ids: Sequence[int]) -> None:
    with pytest.raises(IndexError, match="pool's 8"):
        KVBlocks(torch.zeros(8, 2), ids)


@pytest.mark.parametrize("ids", [[[1]], [0.5], ["1"], [True]])
def test_ids_are_whole_numbers(ids: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        KVBlocks(torch.zeros(8, 2), ids)


@pytest.mark.parametrize(
    "pool",
    [
        torch.zeros(4, 6, 8).transpose(1, 2),
        torch.tensor(1),
        torch.zeros(4, 4).to_sparse(),
        torch.zeros(4, 4, dtype=torch.complex64).conj(),
    ],
)
def test_blocks_in_pieces_are_refused(pool: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        KVBlocks(pool, [0])


def test_a_strided_tensor_of_long_rows_is_its_rows() -> None:
    cache = torch.arange(8 * 2 * 128).view(8, 2, 128)
    rows = rows_of(cache[:, 1])
    assert rows is not None
    assert joined(rows.memory()) == bytes_of(cache[:, 1].contiguous())
    assert landing_of(cache[:, 0]) is not cache
    assert rows_of(cache) is None
    assert rows_of(cache[:, 1, :8]) is None
    assert rows_of(torch.tensor(1)) is None


def test_nothing_lands_in_a_block_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        landing_of(KVBlocks(torch.zeros(8, 2), [1, 2, 1]))
    with pytest.raises(ValueError, match="twice"):
        landing_of(torch.zeros(1, 1024).expand(4, 1024))
    with pytest.raises(ValueError, match="not contiguous"):
        landing_of(torch.zeros(4, 4).t())


def test_blocks_of_another_shape_are_refused() -> None:
    blocks = KVBlocks(torch.zeros(8, 2), [1, 2])
    check_landing(blocks, TensorSpec((2, 2), "float32"), "key")
    for spec in (TensorSpec((3, 2), "float32"), TensorSpec((2, 2), "int32")):
        with pytest.raises(ValueError, match=r"into\['key'\] is blocks of"):
            check_landing(blocks, spec, "key")
    with pytest.raises(ValueError, match="into"):
        check_landing(torch.zeros(2), TensorSpec((2, 2), "float32"), "key")


def _some_memory(chance: random.Random, memory: torch.Tensor) -> KVMemory:
    """Return a tensor, or blocks whose steps are often those of others."""
    start, step = chance.randrange(0, 96, 8), chance.choice((32, 32, 32, 48))
    if chance.random() < 0.2:
        return memory[start * 5 :][: chance.randrange(40)]
    count, width = chance.randrange(1, 8), chance.choice((7, 8, 9, 16))
    pool = memory[start:].as_strided((count, width), (step, 1))
    return KVBlocks(pool, chance.sample(range(count), chance.randrange(count + 1)))


def _each_byte(memory: KVMemory) -> list[int]:
    """Return the address of each of its bytes."""
    if isinstance(memory, torch.Tensor):
        return [memory.data_ptr() + i for i in range(memory.nbytes)]
    return [byte for row in memory.block_ids for byte in _each_byte(memory.pool[row])]


def test_what_shares_a_byte_is_refused_and_nothing_else() -> None:
    chance, memory = random.Random(5), torch.zeros(1000, dtype=torch.uint8)
    found = {True: 0, False: 0}
    for _ in range(400):
        count = chance.randrange(2, 5)
        some = {f"{n}.key": _some_memory(chance, memory) for n in range(count)}
        each = [byte for one in some.values() for byte in _each_byte(one)]
        is_apart = len(set(each)) == len(each)
        found[is_apart] += 1
        with contextlib.nullcontext() if is_apart else pytest.raises(ValueError):
            check_apart(some)
    assert min(found.values()) > 50


def test_layers_of_one_pool_are_apart_where_their_ids_are() -> None:
    pool = torch.zeros(4, 600)
    check_apart({"a": KVBlocks(pool, [0, 1]), "b": KVBlocks(pool, [3, 2])})
    with pytest.raises(ValueError, match=r"into\['a'\] and into\['b'\] share memory"):
        check_apart({"a": KVBlocks(pool, [0, 2]), "b": KVBlocks(pool, [1, 2])})

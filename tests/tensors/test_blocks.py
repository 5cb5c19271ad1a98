from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import numpy
import pytest
import torch
from hypothesis import given, strategies as st

from asynckv.tensors.blocks import (
    KVBlocks,
    KVMemory,
    check_apart,
    check_landing,
    landing_of,
    rows_of,
    spec_in,
    tensor_at,
)
from asynckv.tensors.runs import (
    Memory,
    Runs,
    SmallBlocks,
    copied,
    fill,
    joined,
    landed,
    pieces_of,
    runs_at,
    runs_in,
)
from asynckv.tensors.views import bytes_of, memory_of, spec_of
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


def test_blocks_of_the_same_pool_are_what_indexing_would_copy() -> None:
    pool = torch.arange(24).view(4, 3, 2)
    some = KVBlocks(pool, ()).at((2, 0))
    assert some.shape == (2, 3, 2) and some.nbytes == 96
    assert bytes(joined(some.memory())) == pool[[2, 0]].numpy().tobytes()
    assert not len(some.at(()))
    for absent in (-1, 4):
        with pytest.raises(IndexError, match="outside of the pool's 4"):
            some.at((0, absent))


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
    with pytest.raises(ValueError, match="whole numbers"):
        KVBlocks(torch.zeros(8, 2), [0]).at(ids)


def test_a_pool_is_a_tensor() -> None:
    with pytest.raises(TypeError, match="is a tensor, not a list"):
        KVBlocks([1, 2], [0])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::UserWarning")  # one layout is in beta state
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_nothing_lands_in_what_is_not_dense(layout: str) -> None:
    tensor = getattr(torch.eye(4), layout)()
    with pytest.raises(ValueError, match="make it dense"):
        landing_of(tensor)


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
    with torch.device("meta"):
        assert rows_of(cache[:, 1]) is not None
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


_BASE = bytes(range(256))


def _runs(starts: list[int], nbytes: int, base: bytes | bytearray = _BASE) -> Memory:
    return runs_in(memoryview(base), numpy.array(starts, dtype=numpy.int64), nbytes)


def _expected(starts: list[int], nbytes: int) -> bytes:
    return b"".join(_BASE[start : start + nbytes] for start in starts)


@given(st.lists(st.integers(0, 240)), st.integers(0, 16), st.data())
def test_runs_are_the_bytes_at_their_places(
    starts: list[int], nbytes: int, data: st.DataObject
) -> None:
    memory, expected = _runs(starts, nbytes), _expected(starts, nbytes)
    assert memory.nbytes == len(expected)
    assert joined(memory) == expected
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    assert b"".join(pieces_of(memory, start, stop)) == expected[start:stop]


def test_neighbours_are_one_run() -> None:
    runs = _runs([8, 12, 16, 40, 0, 4], 4)
    assert isinstance(runs, Runs)
    assert len(runs) == 3
    assert [len(piece) for piece in runs.pieces(0, runs.nbytes)] == [12, 4, 8]


@pytest.mark.parametrize("starts", [[], [32], [32, 40, 48]])
def test_what_lies_in_one_place_is_a_plain_view(starts: list[int]) -> None:
    memory = _runs(starts, 8)
    assert isinstance(memory, memoryview)
    assert memory == _expected(starts, 8)


@given(st.permutations(range(16)), st.permutations(range(16)), st.integers(1, 300))
def test_runs_of_different_lengths_are_copied(
    sources: list[int], targets: list[int], piece_nbytes: int
) -> None:
    base = bytearray(16 * 6)
    source = _runs([16 * place for place in sources[:12]], 8)
    target = _runs([6 * place for place in targets], 6, base)
    hot = b"".join(copied(source, target, piece_nbytes))
    assert hot == joined(target) == joined(source)


@pytest.mark.parametrize("spans", [[], [(3, 9)], [(200, 256), (0, 1), (7, 90)]])
def test_runs_are_at_their_places(spans: list[tuple[int, int]]) -> None:
    memory = runs_at(memoryview(_BASE), spans)
    assert isinstance(memory, Runs) is (len(spans) > 1)
    assert joined(memory) == b"".join(_BASE[start:stop] for start, stop in spans)


@given(st.lists(st.binary(max_size=9)))
def test_pieces_land_one_after_the_other(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    middle, base = len(whole) // 2, bytearray(len(whole) + 5)
    target = runs_at(memoryview(base), [(middle + 5, len(base)), (0, middle)])
    hot = list(landed(map(memoryview, pieces), target))
    assert b"".join(hot) == joined(target) == whole


def test_a_few_bytes_fill_runs() -> None:
    base = bytearray(8)
    fill(_runs([4, 1], 2, base), memoryview(b"abcd"))
    assert base == b"\0cd\0ab\0\0"
    fill(_runs([0], 2, base), memoryview(b"xy"))
    assert base == b"xyd\0ab\0\0"


_BYTES = bytes(range(240))


def _blocks(base: bytes | bytearray, numbers: list[int], nbytes: int) -> SmallBlocks:
    starts = numpy.array(numbers, dtype=numpy.int64) * nbytes
    return SmallBlocks(memoryview(base), starts, nbytes)


def _expected_blocks(numbers: list[int], nbytes: int) -> bytes:
    return b"".join(_BYTES[n * nbytes : (n + 1) * nbytes] for n in numbers)


@given(st.lists(st.integers(0, 19), max_size=9), st.integers(1, 12), st.data())
def test_any_part_of_blocks_is_taken(
    numbers: list[int], nbytes: int, data: st.DataObject
) -> None:
    expected = _expected_blocks(numbers, nbytes)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    target = bytearray(stop - start)
    _blocks(_BYTES, numbers, nbytes).take(start, memoryview(target))
    assert target == expected[start:stop]


@given(st.permutations(range(20)), st.integers(1, 12), st.integers(1, 240))
def test_what_is_put_in_pieces_lies_in_its_blocks(
    numbers: list[int], nbytes: int, piece_nbytes: int
) -> None:
    expected = _expected_blocks(numbers, nbytes)
    base = bytearray(20 * nbytes)
    blocks = _blocks(base, numbers, nbytes)
    for start in range(0, len(expected), piece_nbytes):
        blocks.put(start, memoryview(expected[start : start + piece_nbytes]))
    assert base == _BYTES[: 20 * nbytes]


def test_nothing_beside_the_blocks_is_written() -> None:
    base = bytearray(40)
    _blocks(base, [3, 1], 8).put(4, memoryview(b"x" * 8))
    assert base == bytes(8) + b"x" * 4 + bytes(16) + b"x" * 4 + bytes(8)


def test_what_can_only_be_read_is_not_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        _blocks(_BYTES, [3, 1], 8).put(0, memoryview(b"x" * 16))

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Iterator

import numpy
import pytest

from asynckv.errors import GPUFailed
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_blocks import Addresses, DeviceBlocks, run_starts
from asynckv.tensors.quiet_gpus import quiet_gpu
from harness.fake_gpus import FakeProcess
from harness.fake_gpus.gates import Gate

_BLOCK = 64


@pytest.fixture
def blocks(process: FakeProcess) -> Iterator[DeviceBlocks]:
    found = DeviceBlocks(
        lambda: process.cuda, 0, chunk_nbytes=4 * _BLOCK, table_blocks=8, limit_s=5
    )
    yield found
    found.close()


def _pool(process: FakeProcess, count: int) -> DeviceMemory:
    memory = process.cuda.malloc(count * _BLOCK)
    content = numpy.random.default_rng(1).integers(0, 256, count * _BLOCK)
    process.cuda.view(memory)[:] = content
    return memory


def _at(memory: DeviceMemory, *ids: int) -> Addresses:
    found = numpy.array(ids, numpy.uint64) * numpy.uint64(_BLOCK)
    return found + numpy.uint64(memory.address)


def _bytes(process: FakeProcess, memory: DeviceMemory, *ids: int) -> bytes:
    rows = process.cuda.view(memory).reshape(-1, _BLOCK)
    return b"".join(rows[number].tobytes() for number in ids)


def test_blocks_are_gathered_in_the_order_of_their_addresses(
    process: FakeProcess, blocks: DeviceBlocks
) -> None:
    pool, ids = _pool(process, 40), (31, 2, 5, 17, 9, 0, 39, 3, 8)
    found = b"".join(
        bytes(packed) for _, packed in blocks.read(_at(pool, *ids), _BLOCK)
    )
    assert found == _bytes(process, pool, *ids)


def test_one_kernel_takes_what_a_slot_holds(
    process: FakeProcess, blocks: DeviceBlocks
) -> None:
    pool = _pool(process, 40)
    firsts = [first for first, _ in blocks.read(_at(pool, *range(0, 20, 2)), _BLOCK)]
    assert firsts == [0, 4, 8] and process.cuda.launches == 3


def test_packed_blocks_are_scattered(
    process: FakeProcess, blocks: DeviceBlocks
) -> None:
    pool, ids = _pool(process, 40), (3, 30, 4, 11, 7, 20, *range(31, 40), 0)
    content = bytes(range(256))[:_BLOCK] * len(ids)

    def fill(first: int, slot: memoryview) -> None:
        slot[:] = content[first * _BLOCK : first * _BLOCK + len(slot)]

    for _ in blocks.write(_at(pool, *ids), _BLOCK, fill):
        pass
    assert _bytes(process, pool, *ids) == content


def test_more_blocks_than_a_table_holds_are_copied_within_a_gpu(
    process: FakeProcess, blocks: DeviceBlocks
) -> None:
    one, other = _pool(process, 40), process.cuda.malloc(40 * _BLOCK)
    blocks.copy(_at(one, *range(0, 40, 2)), _at(other, *range(20)), _BLOCK)
    moved = _bytes(process, other, *range(20))
    assert moved == _bytes(process, one, *range(0, 40, 2))


def test_a_long_run_is_one_copy_and_no_kernel(process: FakeProcess) -> None:
    blocks = DeviceBlocks(lambda: process.cuda, 0)
    one, other = (process.cuda.malloc(2**21) for _ in range(2))
    process.cuda.view(one)[:] = 5
    ids = numpy.arange(2**15, dtype=numpy.uint64) * numpy.uint64(_BLOCK)
    sources, targets = (ids + numpy.uint64(end.address) for end in (one, other))
    blocks.copy(sources, targets, _BLOCK)
    assert (process.cuda.view(other) == 5).all() and not process.cuda.launches
    blocks.close()


def test_who_stops_in_the_middle_leaves_the_gpu_at_nothing(
    process: FakeProcess, blocks: DeviceBlocks
) -> None:
    pool = _pool(process, 40)
    reading = blocks.read(_at(pool, *range(0, 40, 2)), _BLOCK)
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert not any(stream.work for stream in process.streams.values())
    process.cuda.free(pool)


def test_a_kernel_that_does_not_end_is_given_up(process: FakeProcess) -> None:
    blocks = DeviceBlocks(
        lambda: process.cuda, 0, chunk_nbytes=4 * _BLOCK, limit_s=0.05
    )
    pool = _pool(process, 8)
    list(blocks.read(_at(pool, 1), _BLOCK))
    for stream in process.streams.values():
        stream.add(Gate())
    with pytest.raises(GPUFailed, match="not ended"):
        list(blocks.read(_at(pool, 1), _BLOCK))
    with pytest.raises(GPUFailed, match="earlier"):
        list(blocks.read(_at(pool, 1), _BLOCK))
    before = len(process.space.allocations())
    blocks.close()
    assert len(process.space.allocations()) == before  # it may still be at them


class _Owner:
    """Keeps memory allocated."""


@pytest.mark.parametrize("count", [1, 8])
def test_memory_that_a_kernel_may_still_be_at_is_kept(
    process: FakeProcess, count: int
) -> None:
    blocks = DeviceBlocks(
        lambda: process.cuda, 0, chunk_nbytes=4 * _BLOCK, limit_s=0.05
    )
    pool, owner = _pool(process, 8), _Owner()
    list(blocks.read(_at(pool, 1), _BLOCK))
    for stream in process.streams.values():
        stream.add(Gate())
    cache = dataclasses.replace(pool, owner=owner)
    with pytest.raises(GPUFailed, match="not ended"):
        list(blocks.read(_at(pool, *range(count)), _BLOCK, [cache]))
    kept = weakref.ref(owner)
    del cache, owner
    gc.collect()
    assert kept() is not None


def test_nothing_is_read_before_the_callers_stream_is_there(
    process: FakeProcess, blocks: DeviceBlocks
) -> None:
    gate, stream, ready = Gate(), process.cuda.stream(), process.cuda.event()
    pool, found = _pool(process, 8), list[bytes]()
    stream.add(gate)
    ready.record(stream)
    caches = [dataclasses.replace(pool, ready=ready)]

    def read() -> None:
        for _, packed in blocks.read(_at(pool, 1), _BLOCK, caches):
            found.append(bytes(packed))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(0.02)
    assert thread.is_alive() and not found
    process.cuda.view(pool)[:] = 7
    gate.open()
    thread.join(5)
    assert found == [b"\7" * _BLOCK]


@pytest.mark.parametrize("what", ["copy", "close"])
def test_it_allocates_and_frees_when_no_operation_waits_for_a_peer(
    process: FakeProcess, blocks: DeviceBlocks, what: str
) -> None:
    pool, quiet = _pool(process, 8), quiet_gpu(process.cuda, 0)

    def copy() -> None:
        blocks.copy(_at(pool, 1), _at(pool, 5), _BLOCK)

    if what == "close":
        copy()
    quiet.begin_operation()
    thread = threading.Thread(target=copy if what == "copy" else blocks.close)
    thread.start()
    thread.join(0.02)
    assert thread.is_alive()
    quiet.end_operation()
    thread.join(5)
    assert not thread.is_alive()


def test_closed_it_leaves_no_stream(process: FakeProcess, blocks: DeviceBlocks) -> None:
    pool, before = _pool(process, 8), set(process.streams)
    blocks.copy(_at(pool, 1), _at(pool, 5), _BLOCK)
    assert set(process.streams) > before
    blocks.close()
    assert set(process.streams) == before


def test_a_block_larger_than_a_slot_is_refused(
    process: FakeProcess, blocks: DeviceBlocks
) -> None:
    with pytest.raises(ValueError, match="a slot has"):
        list(blocks.read(_at(_pool(process, 8), 0), 5 * _BLOCK))


def test_a_run_begins_where_one_side_does_not_go_on() -> None:
    sources = numpy.array([0, 64, 128, 192, 512], numpy.uint64)
    targets = numpy.array([0, 64, 256, 320, 384], numpy.uint64)
    assert run_starts(sources, targets, _BLOCK).tolist() == [0, 2, 4]

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from asynckv.devices.block_copies import (
    BlockCopier,
    BlockIds,
    CopyBlocksOp,
    CopyDirection,
    block_copy_jobs,
    copy_kv_blocks,
)
from asynckv.devices.copying import CopyPool, DeviceCopy
from asynckv.testing.blocked import until
from asynckv.types import DTYPE_NBYTES
from harness.children import Begin
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import FakeTorchEvent
from harness.fake_gpus.tensors import FakeTensors


def _caches(
    *shape: int, layers: int = 2, dtype: torch.dtype = torch.int16
) -> dict[str, torch.Tensor]:
    return {
        f"layers.{layer}": torch.randint(-99, 99, shape).to(dtype)
        for layer in range(layers)
    }


def _expected(
    src: dict[str, torch.Tensor],
    dst: dict[str, torch.Tensor],
    src_ids: Sequence[int],
    dst_ids: Sequence[int],
) -> dict[str, torch.Tensor]:
    found = {layer: cache.clone() for layer, cache in dst.items()}
    for layer, cache in found.items():
        cache[list(dst_ids)] = src[layer][list(src_ids)]
    return found


def _check_copied(
    src: dict[str, torch.Tensor],
    dst: dict[str, torch.Tensor],
    src_ids: Sequence[int],
    dst_ids: Sequence[int],
) -> None:
    expected = _expected(src, dst, src_ids, dst_ids)
    copy_kv_blocks(src, dst, src_ids, dst_ids)
    assert all(torch.equal(dst[layer], expected[layer]) for layer in dst)


@given(
    st.lists(st.integers(0, 11), max_size=12),
    st.permutations(range(12)),
    st.sampled_from((3, 4096)),
)
@settings(max_examples=60, deadline=None)
def test_blocks_land_as_if_they_were_indexed(
    src_ids: list[int], dst_ids: list[int], width: int
) -> None:
    src, dst = _caches(12, 2, width), _caches(12, 2, width)
    _check_copied(src, dst, src_ids, dst_ids[: len(src_ids)])


@pytest.mark.parametrize("width", [4, 2**14, 2**20])
@pytest.mark.parametrize(
    ("src_ids", "dst_ids"),
    [([1, 2, 3], [0, 1, 2]), ([3, 2, 1], [0, 1, 2]), ([0, 1, 3], [2, 3, 1])],
)
def test_short_and_long_runs_are_copied(
    width: int, src_ids: list[int], dst_ids: list[int]
) -> None:
    _check_copied(_caches(4, width), _caches(4, width), src_ids, dst_ids)


@pytest.mark.parametrize("ids", [([0, 1, 2], [1, 2, 3]), ([0, 3], [3, 0]), ([2], [2])])
@pytest.mark.parametrize("width", [4, 2**14])
def test_one_cache_may_be_both_sides(
    ids: tuple[list[int], list[int]], width: int
) -> None:
    cache = _caches(4, width)
    _check_copied(cache, cache, *ids)


@pytest.mark.parametrize("width", [16, 2**14])
@pytest.mark.parametrize("ids", [([0, 1, 2], [1, 2, 3]), ([0, 3], [3, 0]), ([2], [2])])
def test_two_storages_may_be_one_memory(
    ids: tuple[list[int], list[int]], width: int
) -> None:
    memory = numpy.arange(5 * width, dtype=numpy.int32).reshape(5, width)
    whole, rest = torch.from_numpy(memory), torch.from_numpy(memory[1:])
    _check_copied({"layer": whole}, {"layer": rest}, *ids)


@pytest.mark.parametrize("name", sorted(DTYPE_NBYTES))
@pytest.mark.parametrize("is_shared", [False, True])
def test_blocks_of_every_dtype_are_copied(name: str, is_shared: bool) -> None:
    if (dtype := getattr(torch, name, None)) is None:
        pytest.skip(f"this torch has no {name}")
    width = 16 * DTYPE_NBYTES[name]
    source = torch.randint(0, 2, (6, width), dtype=torch.uint8)
    target = source if is_shared else torch.zeros(6, width, dtype=torch.uint8)
    expected = target.clone()
    expected[[0, 5, 2]] = source[[4, 1, 0]]
    src, dst = ({"layer": cache.view(dtype)} for cache in (source, target))
    copy_kv_blocks(src, dst, [4, 1, 0], [0, 5, 2])
    assert torch.equal(target, expected)


@pytest.mark.parametrize("ids", [[4, 1, 0], [1, 2, 3]])
@pytest.mark.parametrize("is_lazy", [(True, False), (False, True), (True, True)])
def test_what_torch_has_only_noted_to_conjugate_is_copied_as_it_is_read(
    ids: list[int], is_lazy: tuple[bool, bool]
) -> None:
    src, dst = (
        {"layer": cache.conj() if lazy else cache}
        for cache, lazy in zip(
            torch.randn(2, 6, 8, dtype=torch.complex64), is_lazy, strict=True
        )
    )
    _check_copied(src, dst, ids, [0, 5, 2])


@pytest.mark.parametrize(
    ("cache", "error"),
    [
        (torch.eye(4).to_sparse(), ValueError),
        (torch.eye(4).to_mkldnn(), ValueError),
        ([[1.0]], TypeError),
    ],
)
def test_what_is_no_plain_tensor_is_refused(cache: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"dense|layers\.0 is a list, not a tensor"):
        copy_kv_blocks({"layers.0": cache}, {"layers.0": cache}, [0], [1])


def test_keys_may_come_before_values() -> None:
    src, dst = _caches(2, 8, 3), _caches(2, 8, 3)
    expected = {layer: cache.clone() for layer, cache in dst.items()}
    for layer, cache in expected.items():
        cache[:, [1, 5]] = src[layer][:, [7, 0]]
    copy_kv_blocks(src, dst, [7, 0], [1, 5], "d2h", block_dim=1)
    assert all(torch.equal(dst[layer], expected[layer]) for layer in dst)


def test_a_permuted_cache_may_meet_a_dense_one() -> None:
    # NHD to read, HND in memory: as vLLM's views are.
    src = {layer: cache.transpose(1, 2) for layer, cache in _caches(6, 2, 4, 8).items()}
    _check_copied(src, _caches(6, 4, 2, 8), [5, 0, 1], [2, 3, 4])


@pytest.mark.parametrize("direction", ["h2d", "d2h", None])
def test_on_the_host_alone_any_direction_will_do(
    direction: CopyDirection | None,
) -> None:
    operation: CopyBlocksOp = copy_kv_blocks
    src, dst = _caches(4, 3), _caches(4, 3)
    if direction is not None:
        operation(src, dst, [1], [2], direction)
    copy_kv_blocks(src, dst, torch.tensor([1]), torch.tensor([2]), direction)
    assert all(torch.equal(dst[layer][2], src[layer][1]) for layer in dst)


def test_no_ids_are_no_work() -> None:
    src, dst = _caches(4, 3), _caches(5, 3)
    assert block_copy_jobs(src, dst, [], []) == []
    copy_kv_blocks({}, {}, [], [], "h2d")
    copy_kv_blocks({}, {}, [1], [2])


def test_a_layer_is_one_job_of_its_bytes() -> None:
    jobs = block_copy_jobs(_caches(4, 6), _caches(4, 6), [1, 2, 3], [1, 2, 3])
    assert [job.nbytes for job in jobs] == [3 * 6 * 2] * 2


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "error", "words"),
    [
        ([1, 2], [1], ValueError, "2 blocks cannot go into 1"),
        ([], [1], ValueError, "0 blocks cannot go into 1"),
        ([1, 2], [3, 3], ValueError, "twice"),
        ([4], [0], IndexError, "outside of the 4 of layers.0"),
        ([0], [5], IndexError, "outside of the 5 of layers.0"),
        ([-1], [0], IndexError, "outside of the 4"),
        ([0.5], [0], ValueError, "whole numbers"),
        ([[0]], [[0]], ValueError, "whole numbers"),
    ],
)
def test_ids_that_cannot_be_are_refused(
    src_ids: BlockIds, dst_ids: BlockIds, error: type[Exception], words: str
) -> None:
    src, dst = _caches(4, 3), _caches(5, 3)
    before = {layer: cache.clone() for layer, cache in dst.items()}
    with pytest.raises(error, match=words):
        copy_kv_blocks(src, dst, src_ids, dst_ids)
    assert all(torch.equal(dst[layer], before[layer]) for layer in dst)


def test_layers_of_one_side_only_are_named() -> None:
    src, dst = _caches(4, 3, layers=3), _caches(4, 3, layers=1)
    for ids in ([1], []):
        with pytest.raises(ValueError, match=r"one side only: layers\.1, layers\.2"):
            copy_kv_blocks(src, dst, ids, ids)


@pytest.mark.parametrize(
    ("other", "block_dim"),
    [
        (_caches(4, 2), 0),
        (_caches(4, 3, dtype=torch.int32), 0),
        (_caches(4, 3, 1), 0),
        (_caches(5, 3), 1),
    ],
)
def test_caches_of_other_shapes_or_dtypes_are_refused(
    other: dict[str, torch.Tensor], block_dim: int
) -> None:
    with pytest.raises(ValueError, match=r"layers\.0 is torch\.int16 \(4, 3\) on one"):
        copy_kv_blocks(_caches(4, 3), other, [1], [1], block_dim=block_dim)


@pytest.mark.parametrize("block_dim", [-1, 2])
def test_a_dimension_that_is_not_there_is_refused(block_dim: int) -> None:
    with pytest.raises(ValueError, match=f"no dimension {block_dim}"):
        copy_kv_blocks(_caches(4, 3), _caches(4, 3), [1], [1], block_dim=block_dim)


def _on_a_device(caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {layer: cache.to("meta") for layer, cache in caches.items()}


@pytest.mark.parametrize(
    ("devices", "direction", "words"),
    [
        ("hd", None, "direction=None, but the devices say 'h2d'"),
        ("hd", "d2h", "direction='d2h', but the devices say 'h2d'"),
        ("dh", "h2d", "direction='h2d', but the devices say 'd2h'"),
        ("dd", "h2d", "direction='h2d', but the devices say 'd2d'"),
        ("hh", "h2h", "direction='h2h' is none of"),
    ],
)
def test_a_direction_that_the_devices_gainsay_is_refused(
    devices: str, direction: CopyDirection, words: str
) -> None:
    src, dst = (
        _on_a_device(_caches(4, 3)) if device == "d" else _caches(4, 3)
        for device in devices
    )
    with pytest.raises(ValueError, match=words):
        block_copy_jobs(src, dst, [1], [1], direction)


def test_a_direction_that_the_devices_confirm_is_taken() -> None:
    host, device = _caches(4, 3), _on_a_device(_caches(4, 3))
    assert len(block_copy_jobs(host, device, [1], [1], "h2d")) == 2
    assert len(block_copy_jobs(device, host, [1], [1], "d2h")) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("ids", [([1, 2, 3], [4, 5, 6]), ([3, 1, 2], [0, 7, 5])])
def test_blocks_come_back_from_a_device_as_they_went(
    ids: tuple[list[int], list[int]],
) -> None:
    host, back = _caches(8, 64), _caches(8, 64)
    device = {
        layer: torch.zeros_like(cache, device="cuda") for layer, cache in host.items()
    }
    expected = _expected(host, back, ids[0], ids[0])
    copy_kv_blocks(host, device, ids[0], ids[1], "h2d")
    copy_kv_blocks(device, back, ids[1], ids[0], "d2h")
    assert all(torch.equal(back[layer], expected[layer]) for layer in back)


def _filled_caches(blocks: int, width: int, fill: int) -> dict[str, torch.Tensor]:
    return {
        f"layers.{layer}": torch.full((blocks, width), fill, dtype=torch.uint8)
        for layer in range(4)
    }


@pytest.mark.parametrize("width", [16, 2**19])
async def test_small_and_large_blocks_are_copied(pool: CopyPool, width: int) -> None:
    src, dst = _filled_caches(4, width, 1), _filled_caches(4, width, 0)
    await BlockCopier(pool).copy(src, dst, [1, 2, 0], [3, 0, 1])
    assert [dst["layers.3"][block, -1].item() for block in range(4)] == [1, 1, 0, 1]


async def test_large_blocks_are_copied_in_threads_of_the_pool(pool: CopyPool) -> None:
    src, dst = _filled_caches(24, 2**20, 1), _filled_caches(24, 2**20, 0)
    copier, before = BlockCopier(pool), threading.active_count()
    task = asyncio.create_task(copier.copy(src, dst, range(24), range(24)))
    await asyncio.sleep(0)
    assert not task.done()
    assert threading.active_count() == before + 2
    await task
    assert all(cache.all() for cache in dst.values())


async def test_after_a_cancelled_copy_nothing_is_written_any_more(
    pool: CopyPool, begin: Begin
) -> None:
    src, dst = _filled_caches(24, 2**20, 1), _filled_caches(24, 2**20, 0)
    _, cancel = begin(BlockCopier(pool).copy(src, dst, range(24), range(24)))
    while not dst["layers.0"][0, 0]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await cancel()
    left = {layer: cache.clone() for layer, cache in dst.items()}
    assert not all(cache.all() for cache in dst.values())
    await pool.copy([torch.ones(2**17)], [torch.zeros(2**17)])
    assert all(torch.equal(left[layer], dst[layer]) for layer in dst)


class _Own:
    """An engine's operation that notes where it ran."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(
        self,
        src: Mapping[str, torch.Tensor],
        dst: Mapping[str, torch.Tensor],
        src_ids: list[int],
        dst_ids: list[int],
        direction: CopyDirection,
    ) -> None:
        self.threads.append(threading.current_thread())
        self.gate.wait(10)
        copy_kv_blocks(src, dst, src_ids, dst_ids, direction)


async def test_an_engines_own_operation_runs_in_a_thread(pool: CopyPool) -> None:
    copier, own = BlockCopier(pool), _Own()
    copier.set_host_xfer_buffer_ops(own)
    src, dst = _filled_caches(4, 16, 1), _filled_caches(4, 16, 0)
    await copier.copy(src, dst, torch.tensor([1]), torch.tensor([2]), "h2d")
    assert dst["layers.0"][2].all()
    assert [thread.name.startswith("asynckv-copy") for thread in own.threads] == [True]
    copier.set_host_xfer_buffer_ops(None)
    await copier.copy(src, dst, [1], [3])
    assert len(own.threads) == 1


async def test_a_cancelled_call_waits_for_an_engines_own_operation(
    pool: CopyPool,
) -> None:
    copier, own = BlockCopier(pool), _Own()
    own.gate.clear()
    copier.set_host_xfer_buffer_ops(own)
    src, dst = _filled_caches(4, 16, 1), _filled_caches(4, 16, 0)
    task = asyncio.create_task(copier.copy(src, dst, [1], [2], "h2d"))
    while not own.threads:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    own.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert dst["layers.3"][2].all()


async def test_what_is_refused_is_refused_whoever_copies(pool: CopyPool) -> None:
    copier, own = BlockCopier(pool), _Own()
    src, dst = _filled_caches(4, 16, 1), _filled_caches(4, 16, 0)
    for operation in (None, own):
        copier.set_host_xfer_buffer_ops(operation)
        with pytest.raises(ValueError, match="2 blocks cannot go into 1"):
            await copier.copy(src, dst, [1, 2], [1], "h2d")
        await copier.copy(src, dst, [], [], "h2d")
    with pytest.raises(ValueError, match="needs a direction"):
        await copier.copy(src, dst, [1], [1])
    assert own.threads == []


class _Watched(torch.Tensor):
    """A cache that notes which threads look at it: at its shape, or its blocks."""

    threads: set[int]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.threads.add(threading.get_ident())
        run = super().__torch_function__
        return run(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("ids", [[*range(24, 99)], [1, 1]])
async def test_no_cache_is_looked_at_on_the_loop(
    pool: CopyPool, ids: list[int]
) -> None:
    src, dst = (
        {f"layers.{layer}": torch.full((99, 16), fill) for layer in range(24)}
        for fill in (1, 0)
    )
    _Watched.threads = set()
    watched: dict[str, torch.Tensor] = {
        layer: cache.as_subclass(_Watched) for layer, cache in src.items()
    }
    watched["layers.0"] = src["layers.0"]  # it says on which device they all are
    with contextlib.suppress(ValueError):
        await BlockCopier(pool).copy(watched, dst, ids, ids)
    assert _Watched.threads
    assert threading.get_ident() not in _Watched.threads
    rows = {int(cache.all(1).sum()) for cache in dst.values()}
    assert rows == {0 if ids == [1, 1] else len(ids)}


async def test_ids_may_be_changed_while_they_are_copied(pool: CopyPool) -> None:
    src, dst = _filled_caches(99, 2**14, 1), _filled_caches(99, 2**14, 0)
    ids = [*range(80)]
    copied = asyncio.create_task(BlockCopier(pool).copy(src, dst, ids, ids))
    await asyncio.sleep(0)
    ids[:] = [98] * 80
    await copied
    assert dst["layers.3"].all(1).tolist() == [True] * 80 + [False] * 19


_LAYERS = 3


def _cache(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {
        f"layers.{number}": torch.randint(0, 256, shape, dtype=torch.uint8)
        for number in range(_LAYERS)
    }


def _on_gpu(
    cache: dict[str, torch.Tensor], tensors: FakeTensors
) -> dict[str, torch.Tensor]:
    return {layer: tensors.on_gpu(tensor) for layer, tensor in cache.items()}


@pytest.mark.parametrize("direction", ["d2h", "h2d", "d2d"])
@pytest.mark.parametrize("block_dim", [0, 1])
async def test_blocks_of_all_layers_go_where_torch_would_put_them(
    gpu_pool: CopyPool, tensors: FakeTensors, direction: CopyDirection, block_dim: int
) -> None:
    shape = (20, 4, 16) if not block_dim else (2, 20, 4, 8)
    one, other = _cache(shape), _cache(shape)
    source = _on_gpu(one, tensors) if direction[0] == "d" else one
    target = _on_gpu(other, tensors) if direction[2] == "d" else other
    ids, places = [17, 3, 4, 11, 0], [2, 9, 10, 1, 19]
    copier = BlockCopier(gpu_pool, block_dim=block_dim)
    expected = {layer: cache.clone() for layer, cache in other.items()}
    for layer, cache in expected.items():
        moved = one[layer].index_select(block_dim, torch.tensor(ids))
        cache.index_copy_(block_dim, torch.tensor(places), moved)
    await copier.copy(source, target, ids, places, direction)
    for layer, cache in target.items():
        assert torch.equal(cache.cpu(), expected[layer])


@pytest.mark.parametrize(
    ("begin", "is_apart"),
    [(0, True), (8, False), (32, False), (64, False), (256, True)],
)
async def test_only_blocks_that_lie_apart_are_gathered_and_scattered_on_a_gpu(
    gpu_pool: CopyPool, tensors: FakeTensors, begin: int, is_apart: bool
) -> None:
    memory = tensors.on_gpu(torch.zeros(20 * 32, dtype=torch.uint8))
    source = {"layer": memory[: 8 * 32].view(8, 32)}
    target = {"layer": memory[begin : begin + 8 * 32].view(8, 32)}
    jobs = block_copy_jobs(source, target, [1, 4], [0, 2], "d2d", lanes=gpu_pool.lanes)
    assert [isinstance(job, DeviceCopy) for job in jobs] == [is_apart]


class Fill:
    """Work of a stream that computes a cache of the GPU, as the engine does."""

    def __init__(self, cache: dict[str, torch.Tensor], value: int) -> None:
        self._cache, self._value = cache, value

    def run(self) -> bool:
        for layer in self._cache.values():
            layer.as_subclass(torch.Tensor).fill_(self._value)
        return True


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each look at a mark in a caller's stream has found."""

    def look(event: FakeTorchEvent) -> bool:
        found.append(query(event))
        return found[-1]

    query, found = FakeTorchEvent.query, list[bool]()
    monkeypatch.setattr(FakeTorchEvent, "query", look)
    return found


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
async def test_what_the_callers_stream_was_given_before_is_done_first(
    gpu_pool: CopyPool,
    tensors: FakeTensors,
    looks: list[bool],
    direction: CopyDirection,
) -> None:
    on_gpu, on_host = _on_gpu(_cache((8, 64)), tensors), _cache((8, 64))
    is_out, copier, gate = direction == "d2h", BlockCopier(gpu_pool), Gate()
    source, target = (on_gpu, on_host) if is_out else (on_host, on_gpu)
    expected = [7 if is_out else int(layer[3, 0]) for layer in source.values()]
    engines = tensors.new_stream(0)  # the threads of the pool have another one
    engines.add(gate)
    engines.add(Fill(on_gpu, 7))
    with tensors.use_stream(engines):
        copying = asyncio.create_task(copier.copy(source, target, [3], [5], direction))
        await until(lambda: copying.done() or len(looks) > 3)
    assert not copying.done()
    gate.open()
    await copying
    assert [int(layer.cpu()[5, 0]) for layer in target.values()] == expected


async def test_a_copy_is_cancelled_while_the_callers_stream_is_at_work(
    gpu_pool: CopyPool, tensors: FakeTensors, looks: list[bool], begin: Begin
) -> None:
    source, target, gate = _on_gpu(_cache((8, 64)), tensors), _cache((8, 64)), Gate()
    tensors.stream(0).add(gate)
    _, cancel = begin(BlockCopier(gpu_pool).copy(source, target, [3], [5], "d2h"))
    await until(lambda: len(looks) > 3)
    await cancel()
    assert not any(looks)
    gate.open()

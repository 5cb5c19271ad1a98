from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from asynckv.devices.block_copies import (
    BlockIds,
    CopyBlocksOp,
    CopyDirection,
    block_copy_jobs,
    copy_kv_blocks,
)


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

from __future__ import annotations

import pytest
import torch

from asynckv.connectors.caches import PagedCaches
from asynckv.parallel.shapes import KVLayout
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape
from harness.fake_devices import fake_device

MODEL = ToyModel()


def test_a_split_layout_has_two_pools_a_layer() -> None:
    caches = PagedCaches({"a": torch.zeros(2, 8, 16, 4, 8)}, toy_shape(MODEL))
    assert [tuple(pool.shape) for pool in caches.pools("a")] == [(8, 16, 4, 8)] * 2
    assert set(caches.specs(((1, 2, 3),))) == {"a.key", "a.value"}
    assert caches.specs(((1, 2, 3),))["a.value"].shape == (3, 16, 4, 8)


def test_without_a_shape_a_layer_is_one_pool_of_blocks() -> None:
    caches = PagedCaches({"a": torch.zeros(8, 3)}, None)
    assert list(caches.blocks("a", ((0, 7),))) == ["a.key"]


def test_each_layer_takes_the_blocks_of_its_group() -> None:
    pools = {"a": torch.zeros(8, 3), "b": torch.zeros(8, 3)}
    caches = PagedCaches(pools, None, {"b": 1})
    assert len(caches.blocks("a", ((1, 2), (3,)))["a.key"]) == 2
    assert len(caches.blocks("b", ((1, 2), (3,)))["b.key"]) == 1


def test_one_tensor_for_all_layers_is_cut_into_them() -> None:
    both = torch.zeros(2, 8, 3)
    caches = PagedCaches.across_layers(both, ["a", "b"], None)
    assert caches.layers == ("a", "b")
    assert caches.pools("b")[0].data_ptr() == both[1].data_ptr()
    with pytest.raises(ValueError, match="2 layers, 1 have names"):
        PagedCaches.across_layers(both, ["a"], None)


def test_blocks_of_all_layers_stay_whole() -> None:
    shape = toy_shape(MODEL, layout=KVLayout.named("BLHNC"))
    caches = PagedCaches.across_layers(torch.zeros(8, 4, 4, 16, 16), ["a"], shape)
    assert caches.layers == ("layers",)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (torch.zeros(3, 8, 16, 4, 8), "keys first, then values"),
        (torch.zeros(2, 8, 8, 8).transpose(1, 3), "contiguous"),
    ],
)
def test_what_is_no_such_cache_is_refused(cache: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PagedCaches({"a": cache}, toy_shape(MODEL))
    with pytest.raises(ValueError, match="no cache"):
        PagedCaches({}, None)


def test_caches_of_one_rank_are_on_one_device() -> None:
    with fake_device() as gpu:
        there = gpu.tensor(torch.zeros(8, 3))
        with pytest.raises(ValueError, match="several devices: cpu, cuda:0"):
            PagedCaches({"a": torch.zeros(8, 3), "b": there}, None)

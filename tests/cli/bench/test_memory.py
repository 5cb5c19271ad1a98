from __future__ import annotations

import pytest

from asynckv.cli.bench.rig import WrongBytes, copy_all, make_memory


def test_what_was_copied_is_what_is_checked_for() -> None:
    memory = make_memory(300, 8)
    memory.poison()
    copy_all(memory.target_views, memory.source_views)
    memory.check()


def test_a_part_that_did_not_land_is_noticed() -> None:
    memory = make_memory(3, 8)
    copy_all(memory.target_views, memory.source_views)
    memory.targets[2][-1] = 99
    with pytest.raises(WrongBytes, match="tensor 2"):
        memory.check()


def test_names_are_those_of_the_layers_of_a_key() -> None:
    memory = make_memory(2, 8)
    assert list(memory.layers) == ["0", "1"]
    assert list(memory.into) == ["0.key", "1.key"]
    assert memory.nbytes == 16


def test_scattered_targets_lie_apart_and_never_overlap() -> None:
    memory = make_memory(50, 8, scattered=True)
    places = [target.data_ptr() for target in memory.targets]
    assert len(set(places)) == 50
    assert places != sorted(places)
    assert all(target.is_contiguous() for target in memory.targets)
    assert memory.paged is not None
    for blocks, tensors in zip(
        memory.paged, (memory.sources, memory.targets), strict=True
    ):
        places = [blocks.pool[place].data_ptr() for place in blocks.block_ids]
        assert places == [tensor.data_ptr() for tensor in tensors]
    assert (list(memory.layers), list(memory.into)) == (["0"], ["0.key"])


def test_scattered_sources_are_marked() -> None:
    memory = make_memory(300, 8, scattered=True)
    memory.poison()
    copy_all(memory.target_views, memory.source_views)
    memory.check()

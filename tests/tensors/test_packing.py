from __future__ import annotations

from hypothesis import given, settings, strategies as st

from asynckv.tensors.arena import pack, pages_of
from asynckv.tensors.slabs import PAGE_NBYTES


def test_large_tensors_have_blocks_of_their_own() -> None:
    assert pack([65536, 65537]) == ([16, 17], [(0, 0), (1, 0)])


def test_small_tensors_share_blocks_at_aligned_offsets() -> None:
    blocks, places = pack([1, 100_000, 100, 0])
    assert (blocks, places) == ([1, 25], [(0, 0), (1, 0), (0, 64), (0, 192)])


@settings(deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=60))
def test_no_two_tensors_overlap_and_each_is_inside_its_block(sizes: list[int]) -> None:
    blocks, places = pack(sizes)
    ends = [0] * len(blocks)
    for nbytes, (block, offset) in zip(sizes, places, strict=True):
        assert offset % 64 == 0
        assert ends[block] <= offset
        ends[block] = offset + nbytes
    assert [max(pages_of(end), 0) for end in ends] == blocks
    assert all(pages * PAGE_NBYTES <= 256 * 1024 for pages in blocks)


def test_a_block_is_as_long_as_what_is_in_it() -> None:
    assert pack([60_000] * 5)[0] == [59, 15]
    assert pack([4096, 4096, 4096]) == ([3], [(0, 0), (0, 4096), (0, 8192)])

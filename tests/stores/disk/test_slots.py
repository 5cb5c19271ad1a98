"""The first page of a slot is read as it was written, where it was, or not at all."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, strategies as st

from asynckv.stores.disk.calls import PAGE_NBYTES
from asynckv.stores.disk.slots import (
    MAX_NAMES_NBYTES,
    FoundSlots,
    SlotHeader,
    body_pages_of,
    find_slot,
    fits_page,
    hash_of,
    hashes_of,
    largest_body_pages,
    pack_slot,
    unpack_slot,
)
from asynckv.stores.header import MAX_HEADER_NBYTES

_keys = st.text(max_size=200)
_headers = st.builds(
    SlotHeader,
    key=_keys,
    header=st.binary(max_size=MAX_HEADER_NBYTES),
    body_nbytes=st.integers(0, 2**63),
    sequence=st.integers(0, 2**63),
    file=st.integers(0, 2**32 - 1),
    slot=st.integers(0, 2**32 - 1),
    expires_at_s=st.none() | st.floats(0, 1e12),
)
HEADER = SlotHeader("k1/a", b"header", 5000, 7, 3, 9, 1e9)


def packed(header: SlotHeader) -> memoryview:
    page = memoryview(bytearray(b"?" * PAGE_NBYTES))
    pack_slot(header, page)
    return page


@given(_headers)
def test_a_page_is_read_as_it_was_written(header: SlotHeader) -> None:
    page = packed(header)
    assert unpack_slot(page) == header
    row = find_slot(page, header.file, header.slot)
    expires = float("inf") if header.expires_at_s is None else header.expires_at_s
    assert row == (header.slot, *hash_of(header.key), header.sequence, expires)


def test_a_page_with_one_changed_bit_is_never_read() -> None:
    used = len(bytes(packed(HEADER)).rstrip(b"\0"))
    for bit in range(8 * used):
        page = packed(HEADER)
        page[bit // 8] ^= 1 << bit % 8
        assert unpack_slot(page) is None
        assert find_slot(page, HEADER.file, HEADER.slot) is None


@pytest.mark.parametrize("page", [bytes(PAGE_NBYTES), b"\xff" * PAGE_NBYTES])
def test_a_page_of_something_else_is_never_read(page: bytes) -> None:
    assert unpack_slot(memoryview(page)) is None
    assert find_slot(memoryview(page), 0, 0) is None


def test_a_page_is_found_where_it_was_written_alone() -> None:
    page = packed(HEADER)
    assert find_slot(page, HEADER.file + 1, HEADER.slot) is None
    assert find_slot(page, HEADER.file, HEADER.slot + 1) is None


@given(st.integers(0, 2**40))
def test_a_slot_is_at_most_a_quarter_larger_than_it_must_be(nbytes: int) -> None:
    pages = body_pages_of(nbytes)
    needed = max(-(-nbytes // PAGE_NBYTES), 1)
    assert needed <= pages <= 1.25 * needed
    assert body_pages_of(pages * PAGE_NBYTES) == pages


@given(st.integers(0, 2**40))
def test_the_largest_value_of_a_slot_has_a_slot_of_that_size(nbytes: int) -> None:
    pages = largest_body_pages(nbytes)
    assert (pages + bool(pages)) * PAGE_NBYTES <= nbytes
    if pages:
        assert body_pages_of(pages * PAGE_NBYTES) == pages
        larger = body_pages_of(pages * PAGE_NBYTES + 1)
        assert (larger + 1) * PAGE_NBYTES > nbytes


def test_the_longest_header_fits_beside_a_key_of_hundreds_of_bytes() -> None:
    key = "k" * (MAX_NAMES_NBYTES - MAX_HEADER_NBYTES)
    assert len(key) > 900
    assert fits_page(key, bytes(MAX_HEADER_NBYTES))
    assert not fits_page(key + "k", bytes(MAX_HEADER_NBYTES))
    longest = dataclasses.replace(HEADER, key=key, header=bytes(MAX_HEADER_NBYTES))
    assert unpack_slot(packed(longest)) == longest


@given(st.lists(_keys, max_size=5))
def test_many_keys_have_the_hashes_of_each(keys: list[str]) -> None:
    low, high = hashes_of(keys)
    both = zip(low.tolist(), high.tolist(), strict=True)
    assert list(both) == [hash_of(key) for key in keys]


def test_a_key_may_have_any_characters() -> None:
    header = dataclasses.replace(HEADER, key="\ud800/..\0é")
    assert unpack_slot(packed(header)) == header


def test_nothing_found_is_no_row() -> None:
    assert not len(FoundSlots.of([]).slots)

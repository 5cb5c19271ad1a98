from __future__ import annotations

import pytest

from asynckv.errors import LocalProtocolError
from asynckv.protocol.session import MAX_STREAM, StreamIds


@pytest.fixture
def ids() -> StreamIds:
    return StreamIds(dialled=True, max_skipped=2)


def test_who_dialled_has_odd_ids_and_the_other_even_ones(ids: StreamIds) -> None:
    assert ids.next_own() == 1
    assert StreamIds(dialled=False, max_skipped=0).next_own() == 2


def test_an_id_is_next_until_it_is_used(ids: StreamIds) -> None:
    assert ids.next_own() == 1
    ids.last_own = 1
    assert ids.next_own() == 3


def test_own_ids_end(ids: StreamIds) -> None:
    ids.last_own = MAX_STREAM - 2
    assert ids.next_own() == MAX_STREAM
    ids.last_own = MAX_STREAM
    with pytest.raises(LocalProtocolError, match="used up"):
        ids.next_own()


def test_an_id_of_the_peer_is_used_once(ids: StreamIds) -> None:
    assert ids.take_theirs(2)
    assert not ids.take_theirs(2)


def test_a_skipped_id_may_come_later_and_once(ids: StreamIds) -> None:
    assert ids.take_theirs(4)
    assert not ids.was_used(2)
    assert ids.take_theirs(2)
    assert ids.was_used(2)
    assert not ids.take_theirs(2)


def test_so_many_may_be_skipped_and_no_more(ids: StreamIds) -> None:
    assert not ids.take_theirs(8)
    assert ids.take_theirs(6)
    assert not ids.take_theirs(10)
    assert ids.take_theirs(8)


def test_each_side_has_ids_of_its_own(ids: StreamIds) -> None:
    ids.last_own = 5
    assert ids.was_used(5) and not ids.was_used(7)
    assert not ids.was_used(2)

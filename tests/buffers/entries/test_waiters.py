from __future__ import annotations

from asynckv.buffers.entries.entries import StoredEntry, Waiter
from asynckv.buffers.entries.leases import WaitingQueries, matched_by_id
from asynckv.transfers.queries import Query, make_query
from harness.holders import RecordingHolder, draft_of

ENTRY = StoredEntry(draft_of("a", (1, 2)), 1)


def waiting(line: WaitingQueries, query: Query, seq: int) -> Waiter:
    waiter = Waiter(query, RecordingHolder(), seq, None)
    line.add(waiter)
    return waiter


def oldest(line: WaitingQueries) -> tuple[int, int] | None:
    found = line.oldest(ENTRY, lambda waiter: True)
    return None if found is None else (found[0].seq, found[1])


def test_the_lowest_seq_of_every_kind_of_query_wins() -> None:
    line = WaitingQueries()
    waiting(line, Query(None), 4)
    waiting(line, make_query([1], None), 3)
    assert oldest(line) == (3, 1)
    waiting(line, Query(None, "a"), 2)
    assert oldest(line) == (2, 0)
    waiting(line, make_query([1, 2, 3], None, entry_id="a"), 1)
    assert oldest(line) == (1, 2)


def test_who_comes_back_has_its_old_place() -> None:
    line = WaitingQueries()
    first, second = (waiting(line, Query(None, "a"), seq) for seq in (1, 2))
    line.remove(first)
    assert oldest(line) == (2, 0)
    line.add(first)
    assert oldest(line) == (1, 0)
    line.remove(second)
    line.remove(first)
    line.remove(first)
    assert oldest(line) is None


def test_who_is_refused_is_passed_over() -> None:
    line = WaitingQueries()
    for query in (Query(None), Query(None, "a"), make_query([1], None)):
        for seq in (1, 2):
            waiting(line, query, seq)
    found = line.oldest(ENTRY, lambda waiter: waiter.seq == 2)
    assert found is not None
    assert found[0].seq == 2


def test_a_query_says_how_much_must_match() -> None:
    line = WaitingQueries()
    waiting(line, make_query([1], None, match="exact"), 1)
    waiting(line, make_query([1, 2, 3], None, min_matched_tokens=3), 2)
    assert oldest(line) is None
    waiting(line, make_query([1, 2], None, match="exact"), 3)
    assert oldest(line) == (3, 2)


def test_an_id_with_tokens_asks_for_both() -> None:
    def matched(tokens: list[int], at_least: int = 1) -> int | None:
        query = make_query(tokens, None, entry_id="a", min_matched_tokens=at_least)
        return matched_by_id(Waiter(query, RecordingHolder(), 1, None), ENTRY)

    assert matched([1, 2, 3]) == 2
    assert matched([2]) is None
    assert matched([1], 2) is None


def test_everyone_is_taken_out() -> None:
    line = WaitingQueries()
    for seq, query in enumerate((Query(None), Query(None, "a"), Query(None, "b"))):
        waiting(line, query, seq)
    assert sorted(waiter.seq for waiter in line.everyone()) == [0, 1, 2]
    assert list(line.everyone()) == []

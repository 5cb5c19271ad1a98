from __future__ import annotations

from asynckv.buffers.entries.entries import EntryState, StoredEntry, Waiter
from asynckv.buffers.entries.leases import Matcher, find_by_id
from asynckv.transfers.queries import Query, make_query
from asynckv.types import KVFingerprint
from harness.holders import RecordingHolder, draft_of

ONE_TOKEN = (1).to_bytes(8, "little")


def ready(name: str, tokens: tuple[int, ...] = (1,), seq: int = 1) -> StoredEntry:
    entry = StoredEntry(draft_of(name, tokens), seq)
    entry.state = EntryState.READY
    return entry


def waiting(
    query: Query, seq: int = 1, fingerprint: KVFingerprint | None = None
) -> Waiter:
    return Waiter(query, RecordingHolder(), seq, fingerprint)


def test_the_longest_match_wins_then_the_first_in() -> None:
    maker = Matcher()
    for seq, tokens in enumerate([(1,), (1, 2), (1, 2)]):
        maker.update(ready(str(seq), tokens, seq))
    found = maker.find(waiting(make_query([1, 2, 3], None)))
    assert found is not None
    assert (found[0].entry_id, found[1]) == ("1", 2)


def test_only_equal_fingerprints_match() -> None:
    maker = Matcher()
    maker.update(ready("a"))
    other = KVFingerprint(model="m")
    assert maker.find(waiting(make_query([1], None), 1, other)) is None
    assert maker.peek(ONE_TOKEN, other) == 0
    assert maker.peek(ONE_TOKEN, None) == 1
    assert maker.peek(b"", None) == 0


def test_the_query_that_has_waited_longest_is_next() -> None:
    maker = Matcher()
    for seq in (3, 2):
        maker.enqueue(waiting(make_query([1], None), seq))
    maker.enqueue(waiting(Query(None), 1))
    entry = ready("a", (1, 2))
    entry.deliveries_left = 9
    maker.update(entry)
    served = [maker.next_for(entry) for _ in range(4)]
    assert [found and found[0].seq for found in served] == [1, 2, 3, None]
    assert maker.waiting_count == 0


def test_who_waits_no_longer_is_not_next() -> None:
    maker = Matcher()
    waiter = waiting(make_query([1], None))
    maker.enqueue(waiter)
    maker.dequeue(waiter)
    assert maker.waiting_count == 0
    entry = ready("a")
    maker.update(entry)
    assert maker.next_for(entry) is None


def test_everyone_leaves_in_the_order_of_their_wait() -> None:
    maker = Matcher()
    queries = (Query(None, "id"), make_query([1], None), Query(None))
    for seq, query in enumerate(queries):
        maker.enqueue(waiting(query, seq))
    assert [waiter.seq for waiter in maker.everyone()] == [0, 1, 2]
    assert maker.waiting_count == 0
    assert maker.everyone() == []


def test_an_insert_that_may_fail_is_shown_to_no_stream() -> None:
    entry = ready("a")
    entry.state = EntryState.FILLING
    waiter = waiting(make_query([1], None))
    assert waiter.may_have(entry)
    waiter.holder.streams = True
    assert not waiter.may_have(entry)


def test_what_is_its_consumers_alone_is_found_by_nobody() -> None:
    maker, waiter = Matcher(), waiting(make_query([1], None))
    entry = ready("a")
    maker.update(entry)
    assert maker.find(waiter) == (entry, 1)
    entry.owner_gone = True
    maker.update(entry)
    assert maker.find(waiter) is None
    assert maker.next_for(entry) is None


def test_an_id_finds_its_entry_if_the_tokens_agree() -> None:
    entries = {"a": ready("a", (1, 2))}
    Matcher().update(entries["a"])
    found = find_by_id(entries, waiting(make_query([1], None, entry_id="a")))
    assert found == (entries["a"], 1)
    assert find_by_id(entries, waiting(make_query([2], None, entry_id="a"))) is None
    assert find_by_id(entries, waiting(Query(None, "b"))) is None


def test_an_id_finds_nothing_that_has_no_delivery_left_or_is_of_another_model() -> None:
    entries = {"a": ready("a")}
    by_id = Query(None, "a")
    assert find_by_id(entries, waiting(by_id)) is None
    Matcher().update(entries["a"])
    assert find_by_id(entries, waiting(by_id)) == (entries["a"], 0)
    other = KVFingerprint(model="m")
    assert find_by_id(entries, waiting(by_id, 1, other)) is None

from __future__ import annotations

import collections
import random

import msgspec
import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.codec import FrameDecoder
from asynckv.protocol.wire import TYPE_CONTROL
from harness.fuzzing.mutations import (
    Item,
    change_bytes,
    change_items,
    change_tree,
    join,
)

CONTROL = msgspec.msgpack.encode({"t": "get", "key": "name"})


def test_the_same_seed_makes_the_same_changes() -> None:
    one, two = random.Random(3), random.Random(3)
    for _ in range(200):
        assert change_bytes(CONTROL, one) == change_bytes(CONTROL, two)
        assert change_tree(CONTROL, one) == change_tree(CONTROL, two)


def test_bytes_are_cut_made_longer_and_flipped() -> None:
    rng, data = random.Random(1), bytes(range(100))
    lengths = [len(change_bytes(data, rng)) for _ in range(500)]
    assert min(lengths) < 50 < 100 in lengths
    assert max(lengths) > 100
    assert change_bytes(b"", rng)


def test_trees_stay_frames_or_become_what_is_none() -> None:
    rng = random.Random(1)
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(2000):
        data = Item(TYPE_CONTROL, change_tree(CONTROL, rng), stream=1).sealed()
        try:
            list(FrameDecoder().feed(data))
            outcomes["frame"] += 1
        except RemoteProtocolError as exc:
            outcomes[str(exc).partition(": ")[2][:20]] += 1
    assert outcomes["frame"] > 100
    assert len(outcomes) > 10


def test_bombs_are_among_the_changes() -> None:
    rng = random.Random(1)
    made = b"".join(change_tree(CONTROL, rng) for _ in range(5000))
    for bomb in (b"\x91" * 1000, b"\xdf\xff\xff\xff\xff", b"\xa2\xff\xfe"):
        assert bomb in made


@pytest.mark.parametrize(
    "what", ["order", "count", "stream", "type", "more", "body", "claims"]
)
def test_frames_are_changed_in_every_way(what: str) -> None:
    rng, seen = random.Random(1), set()
    whole = [Item(TYPE_CONTROL, CONTROL, b"body", stream=n) for n in (1, 3, 5)]
    for _ in range(500):
        items = list(whole)
        change_items(items, rng)
        seen |= ways(whole, items)
    assert what in seen


def ways(before: list[Item], after: list[Item]) -> set[str]:
    if len(before) != len(after):
        return {"count"}
    if sorted(map(str, before)) == sorted(map(str, after)) and before != after:
        return {"order"}
    return {
        name
        for one, other in zip(before, after, strict=True)
        for name, is_other in {
            "stream": one.stream != other.stream,
            "type": one.type != other.type,
            "more": one.more != other.more,
            "claims": one.claims != other.claims,
            "body": one.payload != other.payload,
        }.items()
        if is_other
    }


def test_joined_frames_are_heard() -> None:
    items = [Item(TYPE_CONTROL, CONTROL, b"body", stream=n) for n in (1, 3)]
    assert [stream for stream, _, _ in FrameDecoder().feed(join(items))] == [1, 3]

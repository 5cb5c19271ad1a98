"""What peers may send, and every way in which it is changed, comes from a seed."""

from __future__ import annotations

import random

import msgspec
import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Frame, Insert, Ping
from asynckv.protocol.wire import TYPE_CONTROL
from asynckv.transfers.manifest import unpack
from harness.fuzzing.corpus import Corpus, Maker, body_of, frame_makers
from harness.fuzzing.mutations import (
    Item,
    change_bytes,
    change_items,
    change_tree,
    join,
)

FRAMES = frame_makers()
CONTROL = msgspec.msgpack.encode({"t": "get", "key": "name"})


@pytest.fixture
def rng() -> random.Random:
    return random.Random(1)


def test_there_are_frames_of_every_kind_with_fields_up_to_their_bounds(
    rng: random.Random,
) -> None:
    kinds = {kind.__name__ for kind in Frame.__args__}
    assert {name for name, _ in Corpus(1).frames} == set(FRAMES) == kinds
    assert {0, 2**62} <= {FRAMES["Ping"](rng).nonce for _ in range(200)}
    assert {0, 512} <= {len(FRAMES["Get"](rng).key) for _ in range(300)}


@pytest.mark.parametrize("make", FRAMES.values(), ids=FRAMES)
def test_samples_are_valid_frames(make: Maker, rng: random.Random) -> None:
    for _ in range(50):
        frame = make(rng)
        (wire,) = encode_frame(1, frame)
        assert list(FrameDecoder().feed(wire)) == [(1, frame, b"")]


def test_what_is_picked_is_what_a_peer_may_send(rng: random.Random) -> None:
    corpus = Corpus(1)
    for _ in range(200):
        items = corpus.pick(rng, opener=2)
        assert len(list(FrameDecoder().feed(join(items)))) == len(items)
    for _ in range(20):
        body = body_of(Insert("e", 1, inline=True), rng)
        manifest = unpack(body, inline=True)
        assert sum(piece.nbytes for piece in manifest.inline) == manifest.layout.nbytes


def test_what_was_recorded_is_picked_too_and_gone_on_with(rng: random.Random) -> None:
    pings = [encode_frame(0, Ping(n))[0] for n in range(40)]
    said, few = b"".join(pings), b"".join(pings[:2])
    corpus = Corpus(1, [said, few])
    assert few in {join(corpus.pick(rng, opener=1)) for _ in range(200)}
    talks = [join(corpus.conversation(rng)) for _ in range(100)]
    assert all(talk and talk in said and not said.startswith(talk) for talk in talks)
    assert max(map(len, talks)) > len(said) // 2
    assert Corpus(1, [few]).conversation(rng) == []


def test_the_same_seed_makes_the_same_inputs() -> None:
    one, two = (
        [corpus.hostile(random.Random(n), opener=1) for n in range(50)]
        for corpus in (Corpus(4), Corpus(4))
    )
    assert one == two and len(set(one)) > 45


def test_bytes_and_trees_are_changed_to_what_is_none_or_a_bomb(
    rng: random.Random,
) -> None:
    data = bytes(range(100))
    lengths = {len(change_bytes(data, rng)) for _ in range(500)}
    assert min(lengths) < 50 < 100 in lengths and max(lengths) > 100
    trees, outcomes = [change_tree(CONTROL, rng) for _ in range(5000)], []
    for tree in trees:
        try:
            list(FrameDecoder().feed(Item(TYPE_CONTROL, tree, stream=1).sealed()))
            outcomes.append("frame")
        except RemoteProtocolError as exc:
            outcomes.append(str(exc).partition(": ")[2][:20])
    assert outcomes.count("frame") > 250 and len(set(outcomes)) > 11
    for bomb in (b"\x91" * 1000, b"\xdf\xff\xff\xff\xff", b"\xa2\xff\xfe"):
        assert bomb in b"".join(trees)


def test_frames_are_changed_in_every_way(rng: random.Random) -> None:
    whole = [Item(TYPE_CONTROL, CONTROL, b"body", stream=n) for n in (1, 3, 5)]
    seen: set[str] = set()
    for _ in range(500):
        change_items(items := list(whole), rng)
        if len(items) != len(whole):
            seen.add("count")
        elif sorted(map(str, items)) == sorted(map(str, whole)) and items != whole:
            seen.add("order")
        else:
            pairs = list(zip(whole, items, strict=True))
            ways = Item._fields
            seen |= {
                w for w in ways for a, b in pairs if getattr(a, w) != getattr(b, w)
            }
    assert seen == {"count", "order", *Item._fields}

"""What peers may send, and every way in which it is changed, comes from a seed."""

from __future__ import annotations

import collections
import random

import msgspec
import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Frame, Insert, Peek, Ping
from asynckv.protocol.wire import TYPE_CONTROL
from asynckv.transfers.manifest import unpack
from harness.fuzzing.corpus import Corpus, body_of
from harness.fuzzing.mutations import (
    Item,
    change_bytes,
    change_items,
    change_tree,
    join,
)
from harness.fuzzing.samples import (
    Maker,
    frame_makers,
)

FRAMES = frame_makers()
CONTROL = msgspec.msgpack.encode({"t": "get", "key": "name"})


@pytest.fixture
def rng() -> random.Random:
    return random.Random(1)


def test_there_are_frames_of_every_kind_to_start_from() -> None:
    kinds = {kind.__name__ for kind in Frame.__args__}
    assert {name for name, _ in Corpus(1).frames} == set(FRAMES) == kinds


@pytest.mark.parametrize("make", FRAMES.values(), ids=FRAMES)
def test_samples_are_valid_frames(make: Maker, rng: random.Random) -> None:
    for _ in range(50):
        frame = make(rng)
        (wire,) = encode_frame(1, frame)
        assert list(FrameDecoder().feed(wire)) == [(1, frame, b"")]


def test_samples_reach_the_bounds_of_their_fields(rng: random.Random) -> None:
    make = FRAMES["Ping"]
    assert {0, 2**62} <= {make(rng).nonce for _ in range(200)}
    names = [FRAMES["Get"](rng).key for _ in range(300)]
    assert {len(name) for name in names} >= {0, 512}


def test_what_is_picked_is_what_a_peer_may_send(rng: random.Random) -> None:
    corpus = Corpus(1)
    for _ in range(200):
        items = corpus.pick(rng, opener=2)
        assert len(list(FrameDecoder().feed(join(items)))) == len(items)


def test_recorded_frames_are_picked_too(rng: random.Random) -> None:
    said = b"".join(encode_frame(0, Ping(n))[0] for n in range(7, 9))
    corpus = Corpus(1, [said])
    picked = {join(corpus.pick(rng, opener=1)) for _ in range(100)}
    assert said in picked


def test_long_talks_are_gone_on_with_after_their_greeting(rng: random.Random) -> None:
    pings = [encode_frame(0, Ping(n))[0] for n in range(40)]
    said, few = b"".join(pings), b"".join(pings[:5])
    corpus = Corpus(1, [said, few])
    talks = [join(corpus.conversation(rng)) for _ in range(100)]
    assert all(talk in said and talk for talk in talks)
    assert not any(said.startswith(talk) for talk in talks)
    assert max(map(len, talks)) > len(said) // 2
    assert Corpus(1, [few]).conversation(rng) == []


def test_the_same_seed_makes_the_same_inputs() -> None:
    one, two = (
        [corpus.hostile(random.Random(n), opener=1) for n in range(50)]
        for corpus in (Corpus(4), Corpus(4))
    )
    assert one == two
    assert len(set(one)) > 45


def test_bodies_fit_their_frames(rng: random.Random) -> None:
    assert len(body_of(Peek(has_key=True), rng)) % 8 == 0
    assert body_of(Peek(has_key=False), rng) == b""
    for _ in range(20):
        body = body_of(Insert("e", 1, inline=True), rng)
        manifest = unpack(body, inline=True)
        assert sum(piece.nbytes for piece in manifest.inline) == manifest.layout.nbytes


def test_bytes_are_cut_made_longer_and_flipped(rng: random.Random) -> None:
    data = bytes(range(100))
    lengths = [len(change_bytes(data, rng)) for _ in range(500)]
    assert min(lengths) < 50 < 100 in lengths
    assert max(lengths) > 100
    assert change_bytes(b"", rng)


def test_trees_stay_frames_or_become_what_is_none(rng: random.Random) -> None:
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


def test_bombs_are_among_the_changes(rng: random.Random) -> None:
    made = b"".join(change_tree(CONTROL, rng) for _ in range(5000))
    for bomb in (b"\x91" * 1000, b"\xdf\xff\xff\xff\xff", b"\xa2\xff\xfe"):
        assert bomb in made


@pytest.mark.parametrize(
    "what", ["order", "count", "stream", "type", "more", "body", "claims"]
)
def test_frames_are_changed_in_every_way(what: str, rng: random.Random) -> None:
    seen: set[str] = set()
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

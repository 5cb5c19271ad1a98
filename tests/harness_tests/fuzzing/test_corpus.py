from __future__ import annotations

import random

from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Insert, Peek, Ping
from asynckv.transfers.manifest import unpack
from harness.fuzzing.corpus import OF_THE_LINK, OPENING, Corpus, body_of
from harness.fuzzing.mutations import join
from harness.fuzzing.samples import frame_makers


def test_there_are_frames_of_every_kind_to_start_from() -> None:
    names = {name for name, _ in Corpus(1).frames}
    assert names == set(frame_makers())
    assert names > OPENING | OF_THE_LINK


def test_what_is_picked_is_what_a_peer_may_send() -> None:
    corpus, rng = Corpus(1), random.Random(1)
    for _ in range(200):
        items = corpus.pick(rng, opener=2)
        assert len(list(FrameDecoder().feed(join(items)))) == len(items)


def test_recorded_frames_are_picked_too() -> None:
    said = b"".join(encode_frame(0, Ping(n))[0] for n in range(7, 9))
    corpus, rng = Corpus(1, [said]), random.Random(1)
    picked = {join(corpus.pick(rng, opener=1)) for _ in range(100)}
    assert said in picked


def test_long_talks_are_gone_on_with_after_their_greeting() -> None:
    pings = [encode_frame(0, Ping(n))[0] for n in range(40)]
    said, few = b"".join(pings), b"".join(pings[:5])
    corpus, rng = Corpus(1, [said, few]), random.Random(1)
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


def test_bodies_fit_their_frames() -> None:
    rng = random.Random(1)
    assert len(body_of(Peek(has_key=True), rng)) % 8 == 0
    assert body_of(Peek(has_key=False), rng) == b""
    for _ in range(20):
        body = body_of(Insert("e", 1, inline=True), rng)
        manifest = unpack(body, inline=True)
        assert sum(piece.nbytes for piece in manifest.inline) == manifest.layout.nbytes

"""Each oracle can fail: a decoder that breaks a promise is found."""

from __future__ import annotations

import random

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol import codec
from asynckv.protocol.codec import Bodies, FrameDecoder
from asynckv.protocol.frames import Frame
from asynckv.protocol.wire import Header
from harness.fuzzing.corpus import Corpus
from harness.fuzzing.oracle import Finding, measured
from harness.fuzzing.wire_target import WIRE

CORPUS = Corpus(1)
Found = tuple[int, Frame, bytes] | None
next_frame = FrameDecoder.next_frame


def run(inputs: int = 1500, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(inputs):
        WIRE.check(WIRE.make(rng, CORPUS))


def test_nothing_is_found_in_the_real_one() -> None:
    run()
    WIRE.check(b"")


def test_an_undocumented_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_NO_FRAME", ())
    with pytest.raises(Exception) as caught:
        run(50_000)
    assert not isinstance(caught.value, RemoteProtocolError | Finding)


def test_a_decoder_that_minds_how_bytes_are_cut_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgetful(self: FrameDecoder) -> Found:
        found = next_frame(self)
        if found is None and self.missing_bytes == 1:
            self._pending.clear()
        return found

    monkeypatch.setattr(FrameDecoder, "next_frame", forgetful)
    with pytest.raises(Finding, match="another split"):
        run(50_000)


def test_a_frame_that_changes_when_it_is_sent_on_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def once(self: FrameDecoder) -> Found:
        found = next_frame(self)
        if found is None or not found[2]:
            return found
        stream, frame, body = found
        return stream, frame, body + b"?"

    monkeypatch.setattr(FrameDecoder, "next_frame", once)
    with pytest.raises(Finding, match="not the same when sent on"):
        run(50_000)


def test_memory_for_what_is_merely_claimed_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = Bodies.check

    def greedy(self: Bodies, header: Header) -> None:
        bytearray(min(header.payload_bytes, 2**22)).clear()
        check(self, header)

    rng = random.Random(1)
    inputs = [WIRE.make(rng, CORPUS) for _ in range(400)]
    honest = max(measured(WIRE.check, data) for data in inputs)
    monkeypatch.setattr(Bodies, "check", greedy)
    greedily = max(measured(WIRE.check, data) for data in inputs)
    assert honest < 2**19 < 2**22 <= greedily

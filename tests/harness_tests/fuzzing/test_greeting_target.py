from __future__ import annotations

import random

import pytest

from asynckv.protocol import handshake
from asynckv.protocol.greeting import ListenSide
from asynckv.protocol.values import Limits
from asynckv.security.shared_secret import Secret
from harness.fuzzing.corpus import Corpus
from harness.fuzzing.greeting_target import GREETING
from harness.fuzzing.oracle import Finding

CORPUS = Corpus(1)


def run(inputs: int = 1000) -> None:
    rng = random.Random(1)
    for _ in range(inputs):
        GREETING.check(GREETING.make(rng, CORPUS))


def test_nothing_is_found_in_the_real_one() -> None:
    run()
    GREETING.check(b"")


def test_a_proof_that_is_not_looked_at_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Secret, "has_signed", lambda *_: True)
    with pytest.raises(Finding, match="a proof of what was not said"):
        run(50_000)


def test_more_than_was_offered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(ours: Limits, other: Limits) -> Limits:
        return other

    monkeypatch.setattr(handshake, "_smaller", theirs)
    with pytest.raises(Finding, match="more than we offered"):
        run(50_000)


def test_another_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_check_fingerprints", lambda *_: None)
    with pytest.raises(Finding, match="agreed on another model"):
        run(50_000)


def test_an_undocumented_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: ListenSide, *_: object) -> bytes:
        raise KeyError("nonce")

    monkeypatch.setattr(ListenSide, "_on_first", careless)
    with pytest.raises(KeyError):
        run(50_000)

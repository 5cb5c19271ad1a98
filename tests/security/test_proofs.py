from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from asynckv.security.shared_secret import (
    NONCE_BYTES,
    LaneProofs,
    Secret,
    Transcript,
    new_nonce,
    who_proved,
)

OURS, OTHER = Secret(b"o" * 32), Secret(b"x" * 32)


def transcript_of(*said: bytes, binding: bytes = b"") -> Transcript:
    transcript = Transcript(binding)
    for each in said:
        transcript.add(each)
    return transcript


@pytest.mark.refusal
def test_a_proof_is_good_for_its_secret_its_side_and_its_words_only() -> None:
    here, there = transcript_of(b"a", b"b"), transcript_of(b"a", b"b")
    proof = here.prove(OURS, "dialling")
    assert there.is_proved(OURS, "dialling", proof)
    assert not there.is_proved(OURS, "listening", proof)
    assert not there.is_proved(OTHER, "dialling", proof)
    assert not there.is_proved(OURS, "dialling", proof[:-1])
    there.add(b"c")
    assert not there.is_proved(OURS, "dialling", proof)


@pytest.mark.refusal
@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4)))
def test_other_words_make_another_proof(
    first: list[bytes], second: list[bytes]
) -> None:
    proof = transcript_of(*first).prove(OURS, "dialling")
    is_same = transcript_of(*second).is_proved(OURS, "dialling", proof)
    assert is_same == (first == second)


@pytest.mark.refusal
def test_the_same_words_over_another_connection_prove_nothing() -> None:
    proof = transcript_of(b"a", binding=b"one").prove(OURS, "dialling")
    assert not transcript_of(b"a").is_proved(OURS, "dialling", proof)
    assert not transcript_of(b"a", binding=b"two").is_proved(OURS, "dialling", proof)
    assert transcript_of(b"a", binding=b"one").is_proved(OURS, "dialling", proof)


def test_either_of_two_secrets_is_found() -> None:
    for secret in (OURS, OTHER):
        transcript = transcript_of(b"a")
        proof = transcript.prove(secret, "dialling")
        assert who_proved([OURS, OTHER], transcript, "dialling", proof) is secret
    assert who_proved([OURS], transcript, "dialling", proof) is None
    assert who_proved([], transcript, "dialling", b"") is None


@pytest.mark.refusal
def test_a_lane_is_proved_by_number_side_and_link() -> None:
    key = transcript_of(b"a").lane_key(OURS)
    links = [LaneProofs(key), LaneProofs(transcript_of(b"b").lane_key(OURS))]
    claims = list(itertools.product(links, ("dialling", "listening"), range(2)))
    proofs = [link.prove(role, lane) for link, role, lane in claims]  # type: ignore[arg-type]
    assert len(set(proofs)) == len(proofs)
    for (link, role, lane), proof in itertools.product(claims, proofs):
        good = link.prove(role, lane) == proof  # type: ignore[arg-type]
        assert link.is_proved(role, lane, proof) == good  # type: ignore[arg-type]


@pytest.mark.refusal
def test_without_a_key_there_is_nothing_to_prove() -> None:
    proofs = LaneProofs()
    assert proofs.prove("dialling", 0) == b""
    assert proofs.is_proved("dialling", 0, b"")
    assert not proofs.is_proved("dialling", 0, b"x")


def test_no_nonce_comes_twice() -> None:
    nonces = {new_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert {len(nonce) for nonce in nonces} == {NONCE_BYTES}

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from asynckv.protocol.values import Contents
from asynckv.transfers import manifest
from asynckv.transports import parts
from harness.fuzzing import payload_targets
from harness.fuzzing.corpus import Corpus
from harness.fuzzing.oracle import Finding, Target
from harness.fuzzing.payload_targets import CHUNKS, MANIFEST

CORPUS = Corpus(1)


def run(target: Target, inputs: int = 1500) -> None:
    rng = random.Random(1)
    for _ in range(inputs):
        target.check(target.make(rng, CORPUS))


@pytest.mark.parametrize("target", [CHUNKS, MANIFEST], ids=lambda target: target.name)
def test_nothing_is_found_in_the_real_ones(target: Target) -> None:
    run(target)
    target.check(b"")


def test_a_chunk_that_lands_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_check_place", lambda *_: None)
    with pytest.raises(Finding, match="not the next bytes|beyond its memory"):
        run(CHUNKS, 50_000)


def test_a_lane_that_falls_over_a_header_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def careless(data: bytes) -> None:
        raise IndexError(len(data))

    monkeypatch.setattr(payload_targets, "decode_chunk_header", careless)
    with pytest.raises(IndexError):
        run(CHUNKS, 50_000)


def test_a_manifest_read_from_too_few_bytes_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpack = manifest.unpack

    def generous(body: bytes, *, inline: bool) -> Any:
        found = unpack(body, inline=inline)
        short = [piece[:-1] for piece in found.inline]
        return msgspec.structs.replace(found, inline=short)

    monkeypatch.setattr(payload_targets, "unpack", generous)
    with pytest.raises(Finding, match="cut short|not the same"):
        run(MANIFEST, 50_000)


def test_an_undocumented_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        payload_targets,
        "unpack",
        lambda body, inline: msgspec.msgpack.decode(body[4:], type=Contents),
    )
    with pytest.raises((msgspec.MsgspecError, UnicodeError)):
        run(MANIFEST, 50_000)

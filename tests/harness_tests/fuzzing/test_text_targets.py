from __future__ import annotations

import dataclasses
import random
import urllib.parse

import pytest

from asynckv.config import KVTransferConfig
from asynckv.links.address import Address, parse_url
from harness.fuzzing import text_targets
from harness.fuzzing.corpus import Corpus
from harness.fuzzing.oracle import Finding, Target
from harness.fuzzing.text_targets import CONFIG, SIZES, URLS

CORPUS = Corpus(1)


def run(target: Target, inputs: int = 1000) -> None:
    rng = random.Random(1)
    for _ in range(inputs):
        target.check(target.make(rng, CORPUS))


@pytest.mark.parametrize("target", [URLS, CONFIG, SIZES], ids=lambda t: t.name)
def test_nothing_is_found_in_the_real_ones(target: Target) -> None:
    run(target)
    target.check(b"")
    target.check(b"\xff\xfe")


def test_an_address_that_reads_back_as_another_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lossy(url: str) -> Address:
        address = parse_url(url)
        return dataclasses.replace(address, place=urllib.parse.quote(address.place))

    monkeypatch.setattr(text_targets, "parse_url", lossy)
    with pytest.raises(Finding, match="reads back as another"):
        run(URLS, 50_000)


def test_an_undocumented_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(url: str) -> Address:
        return Address("tcp", port=urllib.parse.urlsplit(url).port or 0)

    monkeypatch.setattr(text_targets, "parse_url", careless)
    with pytest.raises(ValueError):
        run(URLS, 50_000)


def test_a_field_that_is_not_looked_at_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KVTransferConfig, "max_bytes", -1)
    with pytest.raises(Finding, match="no room at all"):
        run(CONFIG, 50_000)


def test_a_size_that_is_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_targets, "parse_bytes", lambda text: -1)
    with pytest.raises(Finding, match="no number of bytes"):
        run(SIZES, 50_000)

"""Each oracle can fail: a side that breaks a promise is found."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from asynckv.buffers.remote import select
from asynckv.buffers.serving.lookup import LookupService
from asynckv.buffers.serving.select import ServedSelect
from asynckv.links.link import Link
from asynckv.protocol.frames import Accepted, Frame, Get, Result, Select
from asynckv.protocol.wire import TYPE_CONTROL
from harness.fuzzing import peer_target
from harness.fuzzing.corpus import Corpus
from harness.fuzzing.mutations import Item, join
from harness.fuzzing.oracle import Finding
from harness.fuzzing.peer_target import PEER
from harness.fuzzing.sides import SIDES, Side

NAMES = [side.name for side in SIDES]


def said_to(name: str, *frames: tuple[int, Frame]) -> bytes:
    """Return the input by which a peer says these frames to that side."""
    items = [
        Item(TYPE_CONTROL, msgspec.msgpack.encode(frame), b"", stream)
        for stream, frame in frames
    ]
    return bytes((NAMES.index(name),)) + join(items)


def test_nothing_is_found_in_the_real_sides() -> None:
    rng, corpus = random.Random(1), Corpus(1)
    for _ in range(30):
        PEER.check(PEER.make(rng, corpus))
    PEER.check(b"")


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_every_side_meets_peers(name: str) -> None:
    PEER.check(said_to(name, (1, Accepted()), (3, Get("key")), (1, Result(2))))


def test_a_fault_of_ours_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(*_: Any) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr(LookupService, "open", careless)
    with pytest.raises(Finding, match=r"a fault of ours: .*IndexError.*careless"):
        PEER.check(said_to("serving", (1, Get("key"))))


def test_a_request_that_waits_for_ever_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_target, "END_S", 0.05)
    monkeypatch.setattr(select, "fail_by", lambda *_: None)
    with pytest.raises(Finding, match="hangs on a link that is over"):
        PEER.check(said_to("asking", (1, Result(1))))


@asynccontextmanager
async def never_closed(link: Link) -> AsyncIterator[tuple[()]]:
    yield ()
    await asyncio.get_running_loop().create_future()


def test_a_side_that_cannot_be_closed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_target, "END_S", 0.05)
    monkeypatch.setattr(peer_target, "SIDES", [Side("stuck", True, never_closed)])
    with pytest.raises(Finding, match="something does not end: .*_meet"):
        PEER.check(b"")


def test_what_stays_of_a_peer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedSelect, "on_lost", lambda *_: None)
    with pytest.raises(Finding, match="leases stay"):
        PEER.check(said_to("serving", (1, Select(has_key=False, entry_id="later"))))

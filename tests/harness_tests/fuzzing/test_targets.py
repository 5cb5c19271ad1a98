"""Each target can fail: who breaks a promise of the package is found."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import urllib.parse
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from asynckv.buffers.remote import select
from asynckv.buffers.serving.lookup import LookupService
from asynckv.buffers.serving.select import ServedSelect
from asynckv.config import KVTransferConfig
from asynckv.links.address import Address, parse_url
from asynckv.links.link import Link
from asynckv.protocol import codec, handshake
from asynckv.protocol.codec import Bodies, FrameDecoder
from asynckv.protocol.frames import Accepted, Frame, Get, Result, Select
from asynckv.protocol.hello import ListenSide
from asynckv.protocol.values import Contents
from asynckv.protocol.wire import TYPE_CONTROL, Header
from asynckv.security.shared_secret import Secret
from asynckv.transfers import manifest
from asynckv.transports import parts
from harness.fuzzing import (
    greeting_target,
    peer_target,
    text_targets,
    wire_target,
)
from harness.fuzzing.corpus import Corpus, Finding, Target, measured
from harness.fuzzing.fuzzer import TARGETS
from harness.fuzzing.mutations import Item, join
from harness.fuzzing.peer_target import SIDES, Side

CORPUS = Corpus(1)
NAMES = [side.name for side in SIDES]
Patch = pytest.MonkeyPatch
next_frame = FrameDecoder.next_frame


def run(target: Target, inputs: int) -> None:
    rng = random.Random(1)
    for _ in range(inputs):
        target.check(target.make(rng, CORPUS))


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found_in_the_real_ones(name: str) -> None:
    run(TARGETS[name], 30 if name == "peer" else 1000)
    TARGETS[name].check(b"")
    TARGETS[name].check(b"\xff\xfe")


def raises(error: Exception) -> Callable[..., Any]:
    def careless(*_: object, **options: object) -> Any:
        raise error

    return careless


def forgets_at_a_cut(patch: Patch) -> None:
    def forgetful(self: FrameDecoder) -> tuple[int, Frame, bytes] | None:
        found = next_frame(self)
        if found is None and self.missing_bytes == 1:
            self._pending.clear()
        return found

    patch.setattr(FrameDecoder, "next_frame", forgetful)


def adds_to_bodies(patch: Patch) -> None:
    def longer(self: FrameDecoder) -> tuple[int, Frame, bytes] | None:
        found = next_frame(self)
        return found if not found or not found[2] else (*found[:2], found[2] + b"?")

    patch.setattr(FrameDecoder, "next_frame", longer)


def cuts_what_is_inline(patch: Patch) -> None:
    def generous(body: bytes, *, inline: bool) -> Any:
        found = manifest.unpack(body, inline=inline)
        short = [piece[:-1] for piece in found.inline]
        return msgspec.structs.replace(found, inline=short)

    patch.setattr(wire_target, "unpack", generous)


def decodes_what_comes(patch: Patch) -> None:
    def unpack(body: bytes, inline: bool) -> Any:
        return msgspec.msgpack.decode(body[4:], type=Contents)

    patch.setattr(wire_target, "unpack", unpack)


def quotes_a_place(patch: Patch) -> None:
    def lossy(url: str) -> Address:
        address = parse_url(url)
        return dataclasses.replace(address, place=urllib.parse.quote(address.place))

    patch.setattr(text_targets, "parse_url", lossy)


def lets_urllib_read_it(patch: Patch) -> None:
    def careless(url: str) -> Address:
        return Address("tcp", port=urllib.parse.urlsplit(url).port or 0)

    patch.setattr(text_targets, "parse_url", careless)


Break = Callable[[Patch], None]
BROKEN: dict[str, tuple[Target, Break, tuple[type[Exception], ...], str | None]] = {
    "a decoder that raises anything": (
        wire_target.WIRE,
        lambda patch: patch.setattr(codec, "_NO_FRAME", ()),
        (msgspec.MsgspecError, UnicodeError),
        None,
    ),
    "a decoder that minds how bytes are cut": (
        wire_target.WIRE,
        forgets_at_a_cut,
        (Finding,),
        "another split",
    ),
    "a frame that changes when it is sent on": (
        wire_target.WIRE,
        adds_to_bodies,
        (Finding,),
        "not the same when sent on",
    ),
    "a proof that is not looked at": (
        greeting_target.GREETING,
        lambda patch: patch.setattr(Secret, "has_signed", lambda *_: True),
        (Finding,),
        "a proof of what was not said",
    ),
    "more than was offered": (
        greeting_target.GREETING,
        lambda patch: patch.setattr(handshake, "_smaller", lambda ours, other: other),
        (Finding,),
        "more than we offered",
    ),
    "another model": (
        greeting_target.GREETING,
        lambda patch: patch.setattr(handshake, "_check_fingerprints", lambda *_: None),
        (Finding,),
        "agreed on another model",
    ),
    "a greeting that raises anything": (
        greeting_target.GREETING,
        lambda patch: patch.setattr(ListenSide, "_on_first", raises(KeyError("nonce"))),
        (KeyError,),
        "nonce",
    ),
    "a chunk that lands elsewhere": (
        wire_target.CHUNKS,
        lambda patch: patch.setattr(parts, "_check_place", lambda *_: None),
        (Finding,),
        "not the next bytes|beyond its memory",
    ),
    "a lane that falls over a header": (
        wire_target.CHUNKS,
        lambda patch: patch.setattr(
            wire_target, "decode_chunk_header", raises(IndexError("too short"))
        ),
        (IndexError,),
        "too short",
    ),
    "a manifest read from too few bytes": (
        wire_target.MANIFEST,
        cuts_what_is_inline,
        (Finding,),
        "cut short|not the same",
    ),
    "a manifest that raises anything": (
        wire_target.MANIFEST,
        decodes_what_comes,
        (msgspec.MsgspecError, UnicodeError),
        None,
    ),
    "an address that reads back as another": (
        text_targets.URLS,
        quotes_a_place,
        (Finding,),
        "reads back as another",
    ),
    "an address that raises anything": (
        text_targets.URLS,
        lets_urllib_read_it,
        (ValueError,),
        None,
    ),
    "a field that is not looked at": (
        text_targets.CONFIG,
        lambda patch: patch.setattr(KVTransferConfig, "max_bytes", -1),
        (Finding,),
        "no room at all",
    ),
    "a size that is none": (
        text_targets.SIZES,
        lambda patch: patch.setattr(text_targets, "parse_bytes", lambda text: -1),
        (Finding,),
        "no number of bytes",
    ),
}


@pytest.mark.parametrize(
    ("target", "break_it", "errors", "match"), BROKEN.values(), ids=BROKEN
)
def test_what_breaks_a_promise_is_found(
    target: Target,
    break_it: Break,
    errors: tuple[type[Exception], ...],
    match: str | None,
    monkeypatch: Patch,
) -> None:
    break_it(monkeypatch)
    with pytest.raises(errors, match=match):
        run(target, 50_000)


def test_memory_for_what_is_merely_claimed_is_seen(monkeypatch: Patch) -> None:
    check = Bodies.check

    def greedy(self: Bodies, header: Header) -> None:
        bytearray(min(header.payload_bytes, 2**22)).clear()
        check(self, header)

    rng = random.Random(1)
    inputs = [wire_target.WIRE.make(rng, CORPUS) for _ in range(400)]
    honest = max(measured(wire_target.WIRE.check, data) for data in inputs)
    monkeypatch.setattr(Bodies, "check", greedy)
    greedily = max(measured(wire_target.WIRE.check, data) for data in inputs)
    assert honest < 2**19 < 2**22 <= greedily


def said_to(name: str, *frames: tuple[int, Frame]) -> bytes:
    """Return the input by which a peer says these frames to that side."""
    items = [
        Item(TYPE_CONTROL, msgspec.msgpack.encode(frame), b"", stream)
        for stream, frame in frames
    ]
    return bytes((NAMES.index(name),)) + join(items)


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_every_side_meets_peers(name: str) -> None:
    peer_target.PEER.check(
        said_to(name, (1, Accepted()), (3, Get("key")), (1, Result(2)))
    )


@asynccontextmanager
async def never_closed(link: Link) -> AsyncIterator[tuple[()]]:
    yield ()
    await asyncio.get_running_loop().create_future()


def keeps_requests_waiting(patch: Patch) -> None:
    patch.setattr(peer_target, "END_S", 0.05)
    patch.setattr(select, "fail_by", lambda *_: None)


def keeps_a_side_open(patch: Patch) -> None:
    patch.setattr(peer_target, "MEETING_S", 0.05)
    patch.setattr(peer_target, "SIDES", [Side("stuck", True, never_closed)])


SIDES_THAT_FAIL: dict[str, tuple[Break, bytes, str]] = {
    "a fault of ours": (
        lambda patch: patch.setattr(LookupService, "open", raises(IndexError("out"))),
        said_to("serving", (1, Get("key"))),
        r"a fault of ours: .*IndexError.*careless",
    ),
    "a request that waits for ever": (
        keeps_requests_waiting,
        said_to("asking", (1, Result(1))),
        "hangs on a link that is over",
    ),
    "a side that cannot be closed": (
        keeps_a_side_open,
        b"",
        "something does not end: .*_meet",
    ),
    "what stays of a peer": (
        lambda patch: patch.setattr(ServedSelect, "on_lost", lambda *_: None),
        said_to("serving", (1, Select(has_key=False, entry_id="later"))),
        "leases stay",
    ),
}


@pytest.mark.parametrize(
    ("break_it", "data", "match"), SIDES_THAT_FAIL.values(), ids=SIDES_THAT_FAIL
)
def test_a_side_that_breaks_a_promise_is_found(
    break_it: Break, data: bytes, match: str, monkeypatch: Patch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(Finding, match=match):
        peer_target.PEER.check(data)

"""What peers ask of a server, and what of it makes no sense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.buffers.serving.devices import DeviceService
from asynckv.buffers.serving.lookup import LookupService
from asynckv.buffers.serving.requests import LookupRequests
from asynckv.buffers.serving.service import WaitingBytes
from asynckv.buffers.store import StoreBuffer
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Commit,
    Frame,
    Get,
    Insert,
    OpeningFrame,
    Peek,
    Pin,
    Put,
    Select,
    Taken,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.values import Limits
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.types import TensorSpec
from harness.bodies import body_with
from harness.link_pairs import Hearer, linked, name_of


def requests_of(link: Link, buffer: LookupBuffer) -> LookupRequests:
    devices = DeviceService(buffer, link, "full", may_use_nccl=False)
    return LookupService(buffer, link, WaitingBytes(2**20).for_link(), devices)


async def test_they_wait_until_those_of_the_link_before_have_ended(
    local: LookupBuffer,
) -> None:
    async with linked("mem://") as pair:
        older, requests = (requests_of(pair.far, local) for _ in range(2))
        requests.predecessors = (older,)
        leaving = asyncio.Event()

        async def leave() -> None:
            await leaving.wait()

        older.run(leave(), "one that lets go late")
        waiting = asyncio.create_task(requests.after_predecessors())
        await until_blocked(waiting)
        leaving.set()
        await waiting
        assert older.has_ended and not requests.predecessors


async def test_a_peer_is_charged_up_to_its_own_bound(local: LookupBuffer) -> None:
    async with linked("mem://", near={"limits": Limits(max_receive_bytes=100)}) as pair:
        requests = requests_of(pair.far, local)
        assert requests.may_charge(100) and not requests.may_charge(101)
        requests.charge(60)
        assert requests.may_charge(40) and not requests.may_charge(41)
        requests.charge(-60)
        assert requests.may_charge(100)


LARGE, SMALL = TensorSpec((MIB,), "uint8"), TensorSpec((3,), "uint8")
NO_MATCH = Select(has_key=True)
AN_INSERT = Insert("other", 1, inline=False, streaming=False, on_gpu=False)


@pytest.fixture
async def link(local: LookupBuffer) -> AsyncIterator[Link]:
    """To a server of a lookup buffer and of a store, each with one large tensor."""
    await local.insert([1], None, noise(MIB), None, None, entry_id="it")
    async with StoreBuffer("8MiB") as store:
        await store.put("key", noise(MIB))
        async with serve("mem://", lookup=local, store=store) as server:
            link = await dial(server.url, identity=name_of("peer"))
            yield link
            await link.aclose()


@pytest.mark.parametrize(
    ("asks", "body", "said", "why"),
    [
        (Peek(has_key=True), b"half", None, "no list of tokens"),
        (Select(has_key=True), b"", None, "no list of tokens"),
        (Select(has_key=True), b"seven b", None, "no list of tokens"),
        (NO_MATCH, bytes(8), Commit(), "no Commit belongs here"),
        (NO_MATCH, bytes(8), Grant(1), "never offered"),
        (Taken("it"), b"", Commit(), "no Commit belongs here"),
        (AN_INSERT, body_with({"key": LARGE}), Commit(), "no Commit belongs here"),
        (Get("key"), b"", Sent(2, 0, b""), "no Sent belongs here"),
        (Get("key"), b"", Grant(998), "never offered"),
        (Get("key"), b"", Grant(2, "nccl", "off"), "memory that nothing leads to"),
        (Put("key", 1, inline=False, spec=LARGE), b"", Commit(), "no Commit belongs"),
        (Put("key", 1, inline=True, spec=SMALL), b"four", None, "it declares"),
        (Pin(("key",)), b"", Grant(1), "no Grant belongs here"),
    ],
)
async def test_what_makes_no_sense_breaks_the_link(
    link: Link, asks: OpeningFrame, body: bytes, said: Frame | None, why: str
) -> None:
    stream = link.open_stream(hearer := Hearer(), asks, body)
    if isinstance(asks, Get):
        await hearer.next()
    if said is not None:
        stream.send(said)
    await until(lambda: not link.is_open)
    assert why in str(link.error)

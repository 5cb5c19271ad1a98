"""Questions about entries, and what of them makes no sense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv import LookupBuffer, PeerLost, StoreBuffer, TensorSpec, connect, serve
from asynckv.buffers.serving.devices import DeviceService
from asynckv.buffers.serving.lookup import LookupService
from asynckv.buffers.serving.requests import LookupRequests
from asynckv.buffers.serving.service import WaitingBytes
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Commit,
    Frame,
    Get,
    Insert,
    OpeningFrame,
    Peek,
    Pin,
    Put,
    Result,
    Select,
    Settle,
    Taken,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.values import Limits
from asynckv.testing import until
from asynckv.testing.lookup_checks.values import MIB, noise, started
from asynckv.testing.pairs import Peers
from asynckv.waits.waiting import wait_shielded
from harness.link_pairs import Hearer, dialled, linked, name_of
from harness.raw_inserts import RawInsert, body_with


async def test_a_cancelled_taken_ends_by_one_last_frame(
    local: LookupBuffer, link: Link
) -> None:
    await local.insert([1], None, None, None, None, entry_id="it")
    stream = link.open_stream(hearer := Hearer(), Taken("it"))
    stream.send(Cancel())
    stream.send(Cancel())
    assert await hearer.next() == (Cancelled(), b"")
    assert not local.ledger.table.entries["it"].gone and link.is_open


async def test_settle_tells_whether_a_delivery_counted(link: Link) -> None:
    link.open_stream(hearer := Hearer(), Settle("it", b"token"))
    assert await hearer.next() == (Result(0), b"")


async def test_direct_deliveries_are_charged_to_their_consumer(
    local: LookupBuffer,
) -> None:
    await local.insert([0], None, torch.ones(2 * MIB - 100), None, None)
    async with (
        serve("tcp://127.0.0.1:0", lookup=local) as server,
        connect(server.url) as producer,
        connect(server.url, max_bytes="5MiB") as peer,
    ):
        inserts = [
            asyncio.create_task(
                producer.lookup.insert([n], None, torch.ones(MIB), None, None)
            )
            for n in (1, 2)
        ]
        await until(lambda: local.statistics().waiting_inserts == 2)
        async with peer.lookup.drop_select([1]):
            second = asyncio.create_task(peer.lookup.drop_select([2]))
            await until(lambda: local.statistics().waiting_selects == 1)
            assert local.statistics().outside_bytes == 4 * MIB + 8
        await second
        await asyncio.gather(*inserts)
    assert local.statistics().outside_bytes == 0


async def test_direct_deliveries_of_all_peers_together_are_as_much_as_the_buffer_holds(
    local: LookupBuffer,
) -> None:
    await local.insert([0], None, torch.ones(2 * MIB - 2), None, None)
    async with (
        serve("tcp://127.0.0.1:0", lookup=local) as server,
        connect(server.url) as producer,
        connect(server.url, max_bytes=2**60) as greedy,
        connect(server.url, max_bytes=2**60) as other,
    ):
        key = torch.ones(MIB - 2)
        inserts = [
            asyncio.create_task(producer.lookup.insert([n], None, key, None, None))
            for n in (1, 2, 3)
        ]
        await until(lambda: local.statistics().waiting_inserts == 3)
        async with greedy.lookup.drop_select([1]), greedy.lookup.drop_select([2]):
            third = asyncio.create_task(other.lookup.drop_select([3]))
            await until(lambda: local.statistics().waiting_selects == 1)
            assert local.statistics().outside_bytes == 8 * MIB
        await third
        await asyncio.gather(*inserts)
    assert local.statistics().outside_bytes == 0


async def test_who_waits_for_an_entrys_end_and_is_lost_is_forgotten(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert([1], None, None, None, None, entry_id="it")
    for peer in (peers.producer, peers.consumer):
        taken = asyncio.create_task(peer.lookup.taken("it"))
        await until(lambda: bool(local.ledger.table.entries["it"].gone))
        peer.abort()
        await until(lambda: not local.ledger.table.entries["it"].gone)
        with pytest.raises(PeerLost):
            await taken


@pytest.mark.parametrize("streaming", [False, True])
async def test_leaving_in_a_hurry_waits_for_threads_that_touch_the_memory_of_an_insert(
    local: LookupBuffer, monkeypatch: pytest.MonkeyPatch, *, streaming: bool
) -> None:
    quiet = asyncio.get_running_loop().create_future()
    async with serve("mem://", lookup=local) as server:
        link = await dial(server.url, identity=name_of("peer"))
        raw = RawInsert(link, MIB, streaming=streaming)
        await raw.granted()
        if streaming:
            await raw.push()
        (services,) = server._services
        far_link = services.link
        monkeypatch.setattr(far_link.payload, "quiesce", lambda _: wait_shielded(quiet))
        link.abort()
        await until(lambda: not far_link.is_open)
        leaving = await started(server._close(drain_s=0))
        assert not leaving.done()
        quiet.set_result(None)
        await leaving
        assert local.statistics().used_bytes == 0


async def test_what_is_sent_again_waits_for_the_end_of_the_link_before(
    local: LookupBuffer,
) -> None:
    await local.insert([9], None, torch.ones(2 * MIB - 8), None, None)
    async with serve("mem://", lookup=local) as server:
        name = name_of("producer")
        old = await dial(server.url, identity=name)
        RawInsert(old, MIB)
        await until(lambda: local.statistics().waiting_inserts == 1)
        new = await dial(server.url, identity=name)  # the old one is cut
        again = RawInsert(new, inline=b"abc")
        assert await again.last() == Accepted()
        await new.aclose()


def requests_of(busy_link: Link, buffer: LookupBuffer) -> LookupRequests:
    devices = DeviceService(buffer, busy_link, "full", may_use_nccl=False)
    return LookupService(buffer, busy_link, WaitingBytes(2**20).for_link(), devices)


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
        waiting = await started(requests.after_predecessors())
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
async def busy_link(local: LookupBuffer) -> AsyncIterator[Link]:
    """To a server of a lookup buffer and of a store, each with one large tensor."""
    await local.insert([1], None, noise(MIB), None, None, entry_id="it")
    async with StoreBuffer("8MiB") as store:
        await store.put("key", noise(MIB))
        async with (
            serve("mem://", lookup=local, store=store) as server,
            dialled(server.url, "peer") as busy_link,
        ):
            yield busy_link


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
    busy_link: Link, asks: OpeningFrame, body: bytes, said: Frame | None, why: str
) -> None:
    stream = busy_link.open_stream(hearer := Hearer(), asks, body)
    if isinstance(asks, Get):
        await hearer.next()
    if said is not None:
        stream.send(said)
    await until(lambda: not busy_link.is_open)
    assert why in str(busy_link.error)

"""Deliveries over links that are cut, acknowledged once; and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer
from asynckv.buffers.serve import Server
from asynckv.errors import EntryAborted, LeaseLost, PeerLost
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import Accepted, Ack, Failure, Frame, Noted, Reached, Took
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.pairs import Peers
from asynckv.types import TensorSpec
from harness.buffer_fixtures import CutWhen

FarLink = Callable[[Server, Peer], Link]

MIB = 2**20


@pytest.mark.parametrize(("kind", "nbytes"), [(Took, 10), (Ack, MIB), (Reached, MIB)])
async def test_a_link_cut_around_the_acknowledgement_takes_the_entry_once(
    peers: Peers, local: LookupBuffer, cut_when: CutWhen, kind: type, nbytes: int
) -> None:
    await local.insert([1], None, torch.ones(nbytes), None, None)
    link = await peers.consumer.link()
    cut_when(link, kind)
    entry = await peers.consumer.lookup.drop_select([1])
    assert torch.equal(entry.key, torch.ones(nbytes))  # type: ignore[arg-type]
    await until(lambda: not local.statistics().leased)
    assert local.statistics().entries == (kind is Took)
    assert peers.consumer.budget.used_bytes == 0


async def test_a_noted_that_never_came_is_asked_for_on_the_next_link(
    peers: Peers, local: LookupBuffer, far_link: FarLink, cut_when: CutWhen
) -> None:
    await local.insert([1], None, torch.ones(MIB), None, None)
    cut_when(far_link(peers.server, peers.consumer), Noted)
    entry = await peers.consumer.lookup.drop_select([1])
    assert entry.attempt == 1 and local.statistics().acknowledged == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_link_lost_inside_the_block_is_told_at_its_end(
    peers: Peers, local: LookupBuffer, *, streams: bool
) -> None:
    await local.insert([1], None, torch.ones(10), None, None)
    lookup = peers.consumer.lookup
    enter = lookup.open_drop_select if streams else lookup.drop_select
    with pytest.raises(LeaseLost):
        async with enter([1]):
            (await peers.consumer.link()).abort()
    assert (await lookup.drop_select([1])).attempt == 2


async def test_an_acceptance_lost_with_the_link_is_asked_for_on_the_next(
    peers: Peers, local: LookupBuffer, far_link: FarLink, cut_when: CutWhen
) -> None:
    await local.insert([1], None, torch.ones(10), None, None)
    cut_when(far_link(peers.server, peers.consumer), Accepted)
    async with peers.consumer.lookup.drop_select([1]):
        pass
    assert local.statistics().entries == 0


async def test_an_acceptance_that_nobody_can_tell_of_is_a_lost_lease(
    peers: Peers, local: LookupBuffer, far_link: FarLink, cut_when: CutWhen
) -> None:
    await local.insert([1], None, torch.ones(10), None, None)
    cut_when(far_link(peers.server, peers.consumer), Accepted)
    with pytest.raises(LeaseLost):
        async with peers.consumer.lookup.drop_select([1]):
            peers.consumer.reconnect_s = 0


@pytest.fixture
async def noted(
    local: LookupBuffer, monkeypatch: pytest.MonkeyPatch
) -> list[LinkStream]:
    """The stream on which the server does not send its first Noted."""
    await local.insert([1], None, torch.ones(MIB), None, None)
    send, kept = LinkStream.send, list[LinkStream]()

    def send_or_keep(stream: LinkStream, frame: Frame, body: Buffer = b"") -> None:
        if isinstance(frame, Noted) and not kept:
            kept.append(stream)
        else:
            send(stream, frame, body)

    monkeypatch.setattr(LinkStream, "send", send_or_keep)
    return kept


@pytest.mark.parametrize("way", ["leaves", "cancels"])
async def test_an_acknowledgement_that_is_broken_off_gives_the_entry_back(
    peers: Peers, local: LookupBuffer, noted: list[LinkStream], way: str
) -> None:
    call = asyncio.ensure_future(peers.consumer.lookup.drop_select([1]))
    await until(lambda: bool(noted))
    if way == "leaves":
        await peers.consumer.aclose()
    else:
        call.cancel()
    await asyncio.wait({call})
    assert call.cancelled() or isinstance(call.exception(), PeerLost)
    await until(lambda: not local.statistics().leased)
    assert local.statistics().entries == 1


async def test_an_acknowledgement_that_comes_too_late_selects_again(
    peers: Peers, local: LookupBuffer, noted: list[LinkStream]
) -> None:
    call = asyncio.ensure_future(peers.consumer.lookup.drop_select([1]))
    await until(lambda: bool(noted))
    noted[0].send(Failure("LeaseLost", "taken back"))
    await local.insert([1], None, torch.ones(MIB), None, None, entry_id="other")
    assert (await call).entry_id == "other"
    assert peers.consumer.budget.used_bytes == 0


SPECS = {"0.key": TensorSpec((MIB,), "uint8"), "1.key": TensorSpec((MIB,), "uint8")}

ONES = torch.ones(MIB, dtype=torch.uint8)


async def test_an_entry_whose_writer_fails_before_anything_came_is_not_shown(
    peers: Peers, local: LookupBuffer
) -> None:
    async def read() -> str:
        async with peers.consumer.lookup.open_drop_select([1]) as stream:
            return stream.entry_id

    reading = asyncio.create_task(read())
    await until(lambda: local.statistics().waiting_selects == 1)
    with pytest.raises(LookupError):
        async with local.open_insert([1], None, SPECS):
            raise LookupError
    await until(lambda: local.statistics().waiting_selects == 1)
    await local.insert([1], None, None, None, None, entry_id="next")
    assert await reading == "next"


async def test_leaving_early_stops_what_is_on_its_way_and_frees_the_budget(
    peers: Peers, local: LookupBuffer
) -> None:
    async with local.open_insert([1], None, SPECS) as writer:
        await writer.put("1.key", ONES)
        into = {"0.key": torch.zeros(MIB, dtype=torch.uint8)}
        async with peers.consumer.lookup.open_drop_select([1], into=into) as stream:
            assert torch.equal(await stream.wait_for("1.key"), ONES)
            assert peers.consumer.budget.used_bytes == MIB
        assert peers.consumer.budget.used_bytes == 0
        payload = (await peers.consumer.link()).payload
        assert not payload._table.is_waiting  # type: ignore[attr-defined]
        await writer.put("0.key", ONES)
    assert not into["0.key"].any() and local.statistics().entries == 0


async def test_a_link_lost_in_mid_stream_is_a_lost_peer(
    peers: Peers, local: LookupBuffer
) -> None:
    async with local.open_insert([1], None, SPECS) as writer:
        await writer.put("0.key", ONES)
        with pytest.raises(PeerLost):
            async with peers.consumer.lookup.open_drop_select([1]) as stream:
                await anext(stream)
                (await peers.consumer.link()).abort()
                await anext(stream)
        await writer.put("1.key", ONES)
        async with peers.consumer.lookup.open_drop_select([1]) as stream:
            names = [(await anext(stream))[0] for _ in range(2)]
            assert sorted(names) == list(SPECS) and stream.attempt == 2


async def test_a_stream_that_was_left_gives_nothing_more(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert([1], None, torch.ones(3), None, None)
    async with peers.consumer.lookup.open_drop_select([1]) as stream:
        with pytest.raises(KeyError):
            await stream.wait_for("hidden")
        assert [name async for name, _ in stream] == ["key"]
    with pytest.raises(RuntimeError, match="left already"):
        await stream.wait_for("key")
    with pytest.raises(RuntimeError, match="left already"):
        await anext(stream)


async def test_the_iteration_ends_with_the_commit(
    peers: Peers, local: LookupBuffer
) -> None:
    writing = local.open_insert([1], None, {"key": SPECS["0.key"]})
    writer = await writing.__aenter__()
    await writer.put("key", ONES)
    async with peers.consumer.lookup.open_drop_select([1]) as stream:
        await anext(stream)
        end = asyncio.create_task(anext(stream, None))
        await until_blocked(end)
        assert not end.done()
        await writing.__aexit__(None, None, None)
        assert await end is None


async def test_what_has_landed_outlives_a_writer_that_fails(
    peers: Peers, local: LookupBuffer
) -> None:
    with pytest.raises(LookupError):
        async with local.open_insert([1], None, SPECS) as writer:
            await writer.put("0.key", ONES)
            leased = peers.consumer.lookup.open_drop_select([1])
            stream = await leased.__aenter__()
            await stream.wait_for("0.key")
            raise LookupError
    with pytest.raises(EntryAborted, match="producer"):
        await stream.wait_for("1.key")
    assert torch.equal(await stream.wait_for("0.key"), ONES)
    with pytest.raises(LeaseLost):
        await leased.__aexit__(None, None, None)
    assert local.statistics().entries == 0

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from asynckv.buffers.entries import Draft
from asynckv.buffers.inserting import Inserting
from asynckv.buffers.lookup import LookupBuffer, make_draft
from asynckv.buffers.remote import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.errors import EntryConflict, EntryTooLarge, PeerLost
from asynckv.links.link import Link
from asynckv.protocol.frames import Accepted, Grant, Insert
from asynckv.tensors.views import spec_of
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.link_pairs import linked
from asynckv.testing.pairs import Peers

FarLink = Callable[[Server, Peer], Link]
CutWhen = Callable[[Link, type], None]
LARGE = 2**20


def draft_of(*tensors: torch.Tensor) -> Draft:
    specs = {f"{i}.key": spec_of(tensor) for i, tensor in enumerate(tensors)}
    return make_draft(
        [1], None, specs, entry_id="it", fingerprint=None, ttl_s=1, deliveries=1
    )


async def test_a_grant_that_crosses_the_cancellation_sends_nothing() -> None:
    key = torch.ones(LARGE, dtype=torch.uint8)
    async with linked("mem://", lambda *_: None) as pair:
        inserting = Inserting(pair.near, draft_of(key), [key], None)
        await until(lambda: bool(pair.service.asked))
        stream, frame, _ = pair.service.asked[0]
        assert isinstance(frame, Insert)
        landed: list[bytes] = []
        target = memoryview(bytearray(LARGE))
        pair.far.payload.receive(
            frame.transfer, 0, target, lambda digest, error: landed.append(digest)
        )
        stream.send(Grant(frame.transfer))
        inserting.cancel()
        await inserting.quiesce()
        await until(lambda: inserting.was_granted)
        await asyncio.gather(*[asyncio.sleep(0) for _ in range(20)])
        assert not landed and not any(target[:100])


async def test_what_one_frame_cannot_hold_is_refused_and_the_link_stays(
    peers: Peers, local: LookupBuffer
) -> None:
    tokens = torch.zeros(2**21 + 10, dtype=torch.int64)
    with pytest.raises(EntryTooLarge):
        await peers.producer.lookup.insert(tokens, None, None, None, None)
    with pytest.raises(ValueError, match="ride in one frame"):
        await peers.producer.lookup.drop_select(tokens)
    with pytest.raises(ValueError, match="ride in one frame"):
        await peers.producer.lookup.peek(tokens)
    with pytest.raises(EntryTooLarge):
        async with peers.producer.lookup.open_insert(tokens, None, {}):
            pass
    assert await peers.producer.lookup.peek([1]) == 0


@pytest.mark.parametrize("nbytes", [None, 10, LARGE])
@pytest.mark.parametrize("name", [None, "it"])
async def test_an_answer_lost_with_the_link_commits_once(
    peers: Peers,
    local: LookupBuffer,
    far_link: FarLink,
    cut_when: CutWhen,
    nbytes: int | None,
    name: str | None,
) -> None:
    key = None if nbytes is None else torch.ones(nbytes)
    cut_when(far_link(peers.server, peers.producer), Accepted)
    await peers.producer.lookup.insert([1], None, key, None, None, entry_id=name)
    now = local.statistics()
    assert (now.entries, now.inserted) == (1, 1)


async def test_a_link_cut_in_mid_transfer_is_no_conflict(
    peers: Peers, local: LookupBuffer, far_link: FarLink, cut_when: CutWhen
) -> None:
    cut_when(far_link(peers.server, peers.producer), Grant)
    key = torch.rand(LARGE // 4)
    await peers.producer.lookup.insert([1], None, key, None, None, entry_id="it")
    assert torch.equal((await local.drop_select([1])).key, key)  # type: ignore[arg-type]


async def test_other_contents_under_one_id_conflict(peers: Peers) -> None:
    insert = peers.producer.lookup.insert
    key = torch.zeros(LARGE)
    await insert([1], None, key, None, None, entry_id="it")
    await insert([1], None, key, None, None, entry_id="it")
    with pytest.raises(EntryConflict):
        await insert([1], None, key + 1, None, None, entry_id="it")


@pytest.mark.parametrize("nbytes", [0, 10, LARGE])
async def test_without_digests_the_same_entry_is_still_the_same(
    local: LookupBuffer, nbytes: int
) -> None:
    key = torch.ones(nbytes)
    async with (
        serve("tcp://127.0.0.1:0", lookup=local) as server,
        connect(server.url, digest="off") as peer,
        connect(server.url) as consumer,
    ):
        for _ in range(2):
            await peer.lookup.insert([1], None, key, None, None, entry_id="it")
        entry = await consumer.lookup.drop_select([1])
        assert torch.equal(entry.key, key)  # type: ignore[arg-type]


async def test_an_insert_that_fails_while_it_is_cancelled_is_silent() -> None:
    async with linked("mem://", lambda *_: None) as pair:
        inserting = Inserting(pair.near, draft_of(), [], None)
        task = asyncio.create_task(inserting.accepted())
        await until_blocked(task)
        inserting.on_lost(PeerLost("cut"))
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

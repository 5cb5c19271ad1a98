from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.errors import EntryConflict, EntryTooLarge
from asynckv.links.link import Link
from asynckv.links.options import Digest
from asynckv.protocol.frames import (
    Accepted,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.tensors.views import bytes_of
from asynckv.testing.pairs import Peers
from harness.buffer_fixtures import CutWhen

FarLink = Callable[[Server, Peer], Link]
LARGE = 2**20


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


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
async def test_what_kv_caches_are_made_of_is_what_comes_out(
    peers: Peers, dtype: torch.dtype
) -> None:
    cache = torch.randn(4, 2, 8).to(dtype)
    for key in (cache, cache[:, 1], cache.transpose(0, 1)):
        await peers.producer.lookup.insert([1], None, key, None, None)
        entry = await peers.consumer.lookup.drop_select([1])
        found = entry.key_tensor
        assert (found.dtype, found.shape) == (dtype, key.shape)
        assert bytes(bytes_of(found)) == bytes(bytes_of(key.contiguous()))


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


async def test_a_retry_waits_for_the_end_of_what_was_cancelled(peers: Peers) -> None:
    insert, key = peers.producer.lookup.insert, torch.ones(2**18)
    for n in range(20):
        first = asyncio.create_task(insert([n], None, key, None, None, entry_id=f"{n}"))
        for _ in range(n):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await insert([n], None, key, None, None, entry_id=f"{n}")
        assert await peers.consumer.lookup.withdraw(f"{n}")


async def test_equal_inserts_at_once_succeed_and_leave_one_entry(
    peers: Peers, local: LookupBuffer
) -> None:
    insert, key = peers.producer.lookup.insert, torch.ones(LARGE)
    calls = [insert([1], None, key, None, None, entry_id="it") for _ in range(3)]
    async with asyncio.timeout(20):
        assert await asyncio.gather(*calls) == ["it"] * 3
    assert local.statistics().inserted == 1


async def test_other_contents_under_one_id_conflict(peers: Peers) -> None:
    insert = peers.producer.lookup.insert
    key = torch.zeros(LARGE)
    await insert([1], None, key, None, None, entry_id="it")
    await insert([1], None, key, None, None, entry_id="it")
    with pytest.raises(EntryConflict):
        await insert([1], None, key + 1, None, None, entry_id="it")


@pytest.mark.parametrize("digest", ["off", "full"])
@pytest.mark.parametrize("nbytes", [0, 10, LARGE])
async def test_without_digests_the_same_entry_is_still_the_same(
    local: LookupBuffer, nbytes: int, digest: Digest
) -> None:
    key = torch.ones(nbytes)
    async with (
        serve("tcp://127.0.0.1:0", lookup=local, digest=digest) as server,
        connect(server.url, digest="off") as peer,
        connect(server.url) as consumer,
    ):
        for _ in range(2):
            await peer.lookup.insert([1], None, key, None, None, entry_id="it")
        entry = await consumer.lookup.drop_select([1])
        assert torch.equal(entry.key, key)  # type: ignore[arg-type]

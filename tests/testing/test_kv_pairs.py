from __future__ import annotations

import asyncio

import pytest
import torch

import asynckv
from asynckv.testing import use_across_tasks
from asynckv.testing.kv_pairs import KVPair, open_kv_faults, open_kv_pair
from asynckv.testing.pairs import SCHEMES, Scheme


async def hand_over(pair: KVPair) -> None:
    """One entry from here to the peer, and one tensor back."""
    await pair.lookup.insert([1, 2], None, torch.ones(3), None, None)
    async with pair.peer.lookup.drop_select([1, 2]) as entry:
        assert entry.matched_tokens == 2
    await pair.peer.store.put("name", torch.ones(2))
    assert (await pair.store.contains(["name"])) == (True,)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_pair_is_served_and_connected(scheme: Scheme) -> None:
    async with open_kv_pair(scheme, fingerprint=None) as pair:
        assert pair.server.url.startswith(f"{scheme}://")
        await hand_over(pair)


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_a_pair_with_faults_is_one(scheme: Scheme) -> None:
    async with open_kv_faults(scheme) as pair:
        with pair.tiny_slices(100) as fault:
            await hand_over(pair)
        assert fault.counts.acts > 2
        async with asynckv.connect(pair.url):
            assert pair.proxy.counts.control == 2


async def test_a_silent_side_is_noticed_within_a_second() -> None:
    async with asyncio.timeout(5), open_kv_faults(reconnect_s=0) as pair:
        with pair.black_hole():
            with pytest.raises(asynckv.PeerLost):
                await pair.peer.lookup.drop_select([1])


async def test_a_pair_is_left_in_another_task() -> None:
    await use_across_tasks(open_kv_pair("tcp"), hand_over)
    await use_across_tasks(open_kv_faults(), hand_over)


async def test_a_pair_is_left_quickly_in_the_midst_of_a_fault() -> None:
    async with asyncio.timeout(5):
        async with open_kv_faults() as pair:
            pair.black_hole().begin()
            waiting = asyncio.create_task(pair.peer.lookup.peek([1]))
            await asyncio.wait({waiting}, timeout=0.01)
        with pytest.raises(asynckv.PeerLost):
            await waiting

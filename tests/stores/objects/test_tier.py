"""An object tier keeps what every tier keeps, with an S3 server and in a folder."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from obstore.store import LocalStore

import asynckv
from asynckv.abc.tiers import TierResult
from asynckv.stores.objects.tier import ObjectTier
from asynckv.stores.tiered import TieredStore
from asynckv.testing.expectations import noise
from asynckv.testing.store_checks import CANCELLING_CHECKS, STORING_CHECKS, StoreCheck
from asynckv.testing.tier_checks import TIER_CHECKS, SomeValue, TierCheck, open_tier
from harness.moto_server import MotoServer
from harness.s3_front import Front

MIB = 2**20
DONE, MISSING, FAILED = TierResult.DONE, TierResult.MISSING, TierResult.FAILED
LARGE_NBYTES = 20 * MIB
"""Read by two requests of a bucket, and by five of a folder."""


@pytest.mark.both_loops
@pytest.mark.parametrize("check", TIER_CHECKS, ids=lambda check: check.__name__)
async def test_an_object_tier_keeps_the_contract(check: TierCheck, url: str) -> None:
    await check(lambda: ObjectTier.from_url(url))


@pytest.mark.parametrize(
    "check", [*STORING_CHECKS, *CANCELLING_CHECKS], ids=lambda check: check.__name__
)
async def test_a_store_on_it_keeps_what_a_store_buffer_keeps(
    check: StoreCheck, url: str
) -> None:
    async with TieredStore(16 * MIB, [url]) as store:
        await check(store, store)


async def test_what_it_has_accepted_is_found_by_the_next_process(url: str) -> None:
    async with TieredStore(32 * MIB, [url]) as store:
        await store.put("a", noise(LARGE_NBYTES, 1))
        (flushed,) = (await store.flush()).values()
        assert flushed.accepted == 1
    async with (
        TieredStore(32 * MIB, [url]) as store,
        asynckv.serve("tcp://127.0.0.1:0", store=store) as server,
        asynckv.connect(server.url) as peer,
    ):
        assert await peer.store.match_prefix(["a", "b"]) == 1
        found = await peer.store.get("a")
        assert found is not None
        assert torch.equal(found, noise(LARGE_NBYTES, 1))


async def test_two_stores_in_one_place_find_what_either_has_put(url: str) -> None:
    async with TieredStore(MIB, [url]) as one, TieredStore(MIB, [url]) as other:
        for number, (writer, reader) in enumerate([(one, other), (other, one)]):
            await writer.put(f"k{number}", noise(5000, number))
            await writer.flush()
            found = await reader.get(f"k{number}")
            assert found is not None
            assert torch.equal(found, noise(5000, number))


async def test_pieces_of_a_large_value_are_never_of_two_versions(url: str) -> None:
    async with ObjectTier.from_url(url) as writer, ObjectTier.from_url(url) as reader:
        values = [SomeValue("k1/a", LARGE_NBYTES, seed) for seed in range(2)]
        stored = [value.to_store() for value in values]
        await writer.store(stored[:1])
        is_over = False

        async def replace() -> None:
            for turn in range(1, 12):
                assert await writer.store([stored[turn % 2]]) == [DONE]

        replacing = asyncio.ensure_future(replace())
        while not is_over:
            is_over = replacing.done()
            wanted = SomeValue("k1/a", LARGE_NBYTES)
            (result,) = await reader.fetch([wanted])
            assert result is not DONE or wanted.is_one_of(0, 1)
        await replacing
        assert result is DONE


async def test_a_prefix_is_asked_for_until_a_round_finds_nothing(url: str) -> None:
    keys = [f"k1/{number}" for number in range(200)]
    # Else a busy machine's answers come when half of it is over: then all is unknown.
    url += f"{'&' if '?' in url else '?'}patience=60"
    async with ObjectTier.from_url(url) as tier:
        assert await tier.contains(keys) == [MISSING] * 64 + [FAILED] * 136
    async with ObjectTier.from_url(url) as tier:
        assert await tier.store([SomeValue(keys[63], 10).to_store()]) == [DONE]
    async with ObjectTier.from_url(url) as tier:
        found = [MISSING] * 63 + [DONE] + [MISSING] * 64 + [FAILED] * 72
        assert await tier.contains(keys) == found


async def test_what_was_heard_of_a_key_is_not_asked_again(
    s3: MotoServer, prefix: str
) -> None:
    async with Front(s3.port).listening() as front:
        url = s3.url(prefix, endpoint=f"http://127.0.0.1:{front.port}")
        async with ObjectTier.from_url(url) as tier:
            assert await tier.store([SomeValue("k1/a", 10).to_store()]) == [DONE]
            assert await tier.contains(["k1/b"]) == [MISSING]
            front.answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
            assert await tier.contains(["k1/a", "k1/b"]) == [DONE, MISSING]


async def test_what_is_put_by_one_tier_is_deleted_by_another(url: str) -> None:
    async with ObjectTier.from_url(url) as one, ObjectTier.from_url(url) as other:
        assert await one.store([SomeValue("k1/a", 10).to_store()]) == [DONE]
        assert await other.delete(["k1/a"]) == [DONE]
        assert await one.fetch([SomeValue("k1/a", 10)]) == [MISSING]
        assert await one.contains(["k1/a"]) == [MISSING]


@pytest.mark.parametrize("key", ["", "a//b", "k1/../a"])
async def test_a_key_that_no_object_can_have_is_a_failure(key: str, url: str) -> None:
    async with ObjectTier.from_url(url) as tier:
        assert await tier.store([SomeValue(key, 10).to_store()]) == [FAILED]
        assert await tier.fetch([SomeValue(key, 10)]) == [FAILED]
        assert await tier.delete([key]) == [FAILED]
        assert await tier.contains([key]) == [FAILED]


def test_a_patience_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="patience_s is a number of seconds"):
        ObjectTier(LocalStore(), patience_s=math.nan)


async def test_what_is_written_while_it_is_read_is_not_missing(url: str) -> None:
    class Unreadable(SomeValue):
        async def place(self, header: bytes | memoryview) -> None:
            placing.set()
            await written.wait()
            raise ValueError("no header")

    placing, written = asyncio.Event(), asyncio.Event()
    async with open_tier(lambda: ObjectTier.from_url(url)) as tier:
        await tier.store([SomeValue("a", 64, 1).to_store()])
        reading = asyncio.ensure_future(tier.fetch([Unreadable("a")]))
        await placing.wait()
        assert list(await tier.store([SomeValue("a", 64, 2).to_store()])) == [DONE]
        written.set()
        assert list(await reading) == [MISSING]
        assert list(await tier.contains(["a"])) == [DONE]

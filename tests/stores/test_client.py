"""One tier in use: what it is told, in which order, and what is not asked of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from asynckv.abc import (
    TierFacts,
    TierMemory,
    TierPrefix,
    TierResult,
    TierValue,
    WantedValue,
)
from asynckv.stores.client import TierClient
from asynckv.stores.health import Quarantine
from asynckv.testing.blocked import until
from harness.tiers import DictTier


class Value:
    """Something that is written."""

    def tier_value(self, key: str) -> TierValue:
        return TierValue(key, b"header", TierMemory(0, ()))


class Unwanted(WantedValue):
    """Something that is asked for, and has no room."""

    is_held = False
    lent_nbytes = 0

    async def place(self, header: bytes | memoryview) -> None:
        return None


@pytest.fixture
def tier() -> DictTier:
    return DictTier(facts=TierFacts(patience_s=30.0, max_value_nbytes=100))


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine(10)


@pytest.fixture
async def client(
    tier: DictTier, quarantine: Quarantine
) -> AsyncIterator[TierClient[Value]]:
    client: TierClient[Value] = TierClient(
        "tier", tier, quarantine, 1000, lambda value: None
    )
    await client.open()
    yield client
    await client.aclose()


def write(client: TierClient[Value], key: str, epoch: int, nbytes: int = 1) -> bool:
    return client.write(key, epoch, Value(), nbytes, key)


async def test_what_is_larger_than_the_tier_takes_is_not_sent_to_it(
    client: TierClient[Value], tier: DictTier
) -> None:
    assert not write(client, "a", 1, nbytes=101)
    assert write(client, "b", 2, nbytes=100)
    await client.flush()
    assert list(tier.values) == ["b"]


async def test_changes_of_one_key_arrive_one_after_the_other(
    client: TierClient[Value], tier: DictTier
) -> None:
    tier.hold("store")
    write(client, "a", 1)
    await until(lambda: tier.calls["store"] == 1)
    client.delete("a", 2)
    write(client, "b", 3)
    assert tier.calls["delete"] == 0
    tier.let_go("store")
    await client.flush()
    assert list(tier.values) == ["b"]


async def test_of_many_keys_some_are_asked_for_at_once_while_there_are_answers(
    client: TierClient[Value], tier: DictTier
) -> None:
    keys = [f"{number}" for number in range(3000)]
    tier.values.update(dict.fromkeys(keys[1::2], b""))
    assert await client.contains(keys) == set(keys[1::2])
    client.touch(keys)
    await until(lambda: len(tier.touched) == 3000)
    assert tier.calls["contains"] == 3
    tier.raises.add("contains")
    assert not await client.contains(keys)
    assert tier.calls["contains"] == 6
    assert not await client.contains(keys)


async def test_what_is_asked_in_one_turn_is_one_call_of_the_tier(
    client: TierClient[Value], tier: DictTier
) -> None:
    tier.values.update(a=b"", b=b"")
    first = client.contains(["a", "b", "c"])
    client.delete("a", 1)
    asked = (first, client.contains(["a", "b"]), client.contains([]))
    assert list(await asyncio.gather(*asked)) == [{"a", "b"}, {"b"}, set()]
    assert tier.calls["contains"] == 1


async def test_a_question_that_is_cancelled_leaves_the_others_their_answers(
    client: TierClient[Value], tier: DictTier
) -> None:
    tier.values.update(a=b"", b=b"")
    tier.hold("contains")
    cancelled, other = client.contains(["a"]), client.contains(["b"])
    await until(lambda: tier.calls["contains"] == 1)
    cancelled.cancel()
    tier.let_go("contains")
    assert await other == {"b"}


async def test_writes_wait_for_loads_that_are_under_way(
    client: TierClient[Value], tier: DictTier
) -> None:
    tier.hold("contains")
    asking = client.contains(["x"])
    await until(lambda: tier.calls["contains"] == 1)
    write(client, "a", 1)
    await asyncio.sleep(0)
    assert tier.calls["store"] == 0
    tier.let_go("contains")
    await asking
    await client.flush()
    assert tier.calls["store"] == 1


async def test_nothing_is_asked_while_too_much_memory_is_lent_to_late_calls(
    client: TierClient[Value], quarantine: Quarantine
) -> None:
    assert client.may_have("a")
    quarantine.nbytes = 10
    assert not client.may_have("a")
    assert client.statistics().refused == 1


async def test_what_waits_for_a_tier_that_fails_is_dropped_and_lets_its_memory_go(
    client: TierClient[Value], tier: DictTier
) -> None:
    tier.raises.add("store")
    for epoch, key in enumerate("ab", start=1):
        write(client, key, epoch)
        await client.flush()
    tier.hold("store")
    write(client, "c", 3)
    await until(lambda: tier.calls["store"] == 3)
    write(client, "d", 4)
    tier.let_go("store")
    await until(lambda: not client.statistics().is_storing)
    assert client.statistics().waiting_bytes == 0


async def test_what_was_not_deleted_is_deleted_later(
    client: TierClient[Value], tier: DictTier
) -> None:
    write(client, "a", 1)
    await client.flush()
    tier.fails.add("delete")
    client.delete("a", 2)
    await until(lambda: tier.calls["delete"] > 0)
    tier.fails.clear()
    await until(lambda: not tier.values)


async def test_calls_that_move_values_are_timed_each(
    client: TierClient[Value], tier: DictTier
) -> None:
    write(client, "a", 1)
    await client.flush()
    await until(lambda: client.statistics().store_latencies.count == 1)
    await client.contains(["a"])
    await client.fetch([Unwanted("a"), Unwanted("b")], lambda: None)
    assert client.statistics().fetch_latencies.count == 1
    assert client.statistics().store_latencies.count == 1


async def test_what_is_not_cleared_any_more_is_said_once(
    client: TierClient[Value], tier: DictTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier.values["0/a"] = b""
    for number in range(1100):
        client.clear(f"{number}/", 1 + number)
    assert not await client.contains(["0/a"])
    await client.flush()
    assert not await client.contains(["0/a"])
    assert caplog.text.count("has too much to clear: what it has of 0/ stays") == 1
    assert caplog.text.count("too much to clear") == 1


class DeletesOne(DictTier):
    """Deletes the first key of each call, and the others once it is whole."""

    is_whole = False

    async def delete(self, keys: Sequence[str]) -> Sequence[TierResult]:
        most = len(keys) if self.is_whole else 1
        left = [TierResult.FAILED] * (len(keys) - most)
        return [*await super().delete(keys[:most]), *left]


async def test_of_ever_so_many_deletes_that_failed_each_is_made_again() -> None:
    tier = DeletesOne({f"{number}": b"" for number in range(600)})
    client = TierClient[Value]("tier", tier, Quarantine(10), 1000, lambda value: None)
    await client.open()
    for epoch, key in enumerate(list(tier.values), start=1):
        client.delete(key, epoch)
    await client.flush()
    assert len(tier.values) > 512
    tier.is_whole = True
    await until(lambda: not tier.values)
    await client.aclose()


async def test_what_waits_for_a_tier_that_is_away_is_dropped_however_much_it_is(
    client: TierClient[Value], tier: DictTier
) -> None:
    tier.hold("store")
    for number in range(900):
        write(client, f"{number}", 1 + number)
    await until(lambda: tier.calls["store"] == 1)
    tier.fails.add("store")
    tier.let_go("store")
    await until(lambda: not client.statistics().is_storing)
    await until(lambda: client.statistics().waiting == 0)
    assert client.statistics().dropped == 900 - client.statistics().unwritten == 852


class OftenCleared(DictTier):
    """Fails to clear ``slow/`` after a while, and anything else at once, once."""

    def __init__(self) -> None:
        super().__init__(facts=TierFacts(patience_s=30.0))
        self.told: list[str] = []

    async def clear(self, prefix: TierPrefix) -> TierResult:
        self.told.append(prefix.prefix)
        if prefix.prefix == "slow/":
            began_s = time.monotonic()
            await until(lambda: time.monotonic() > began_s + 0.3)
        is_first = self.told.count(prefix.prefix) == 1
        return TierResult.FAILED if is_first else TierResult.DONE


async def test_a_model_that_took_long_to_clear_does_not_keep_others_waiting() -> None:
    tier = OftenCleared()
    client = TierClient[Value]("tier", tier, Quarantine(10), 1000, lambda value: None)
    await client.open()
    client.clear("slow/", 1)
    await client.flush()
    client.clear("quick/", 2)
    await until(lambda: tier.told.count("quick/") == 2, timeout_s=5)
    assert tier.told.count("slow/") == 1
    await client.aclose()


async def test_a_clearing_that_does_not_end_keeps_no_value_from_being_written() -> None:
    tier = DictTier(facts=TierFacts(patience_s=0.05))
    client = TierClient[Value]("tier", tier, Quarantine(10), 1000, lambda value: None)
    await client.open()
    tier.hold("clear")
    client.clear("p/", 1)
    await until(lambda: client.statistics().late == 1)
    await until(lambda: client.statistics().is_storing)
    write(client, "p/a", 2)
    async with asyncio.timeout(5):
        await client.flush()
    assert list(tier.values) == ["p/a"]
    tier.let_go("clear")
    await client.aclose()


class StuckOnce(DictTier):
    """Its first store ends when it is let go on; later ones end at once."""

    def __init__(self) -> None:
        super().__init__(facts=TierFacts(patience_s=0.05))
        self.goes_on = asyncio.Event()
        self.is_stuck = False

    async def store(self, values: Sequence[TierValue]) -> Sequence[TierResult]:
        if not self.is_stuck:
            self.is_stuck = True
            await self.goes_on.wait()
        return await super().store(values)


async def test_a_store_call_that_does_not_end_keeps_no_model_from_being_cleared() -> (
    None
):
    tier = StuckOnce()
    client = TierClient[Value]("tier", tier, Quarantine(10), 1000, lambda value: None)
    await client.open()
    write(client, "p/a", 1)
    await until(lambda: client.statistics().late == 1)
    await until(lambda: client.statistics().is_storing)
    client.clear("p/", 2)
    write(client, "p/b", 3)
    await until(lambda: list(tier.values) == ["p/b"])
    tier.goes_on.set()
    await until(lambda: "p/a" in tier.values)
    await client.flush()
    assert await client.contains(["p/a", "p/b"]) == {"p/b"}
    assert not client.behind.valid_from("p/a").has(1, "p/a")
    await client.aclose()


async def test_all_that_waits_is_dropped_in_turns_when_it_is_closed(
    client: TierClient[Value], tier: DictTier
) -> None:
    tier.hold("store")
    for number in range(700):
        write(client, f"{number}", number)
    await until(lambda: tier.calls["store"] == 1)
    client.abort()
    assert client.statistics().waiting >= 700 - 256
    await asyncio.sleep(0)
    assert 700 - 256 > client.statistics().waiting > 100
    await client.aclose()
    assert client.statistics().waiting == 16  # are under way
    tier.let_go("store")

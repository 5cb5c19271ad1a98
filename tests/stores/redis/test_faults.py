"""What a Redis does wrong is a miss and one line in the log, and never wrong bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis.asyncio

from asynckv.abc.tiers import TierMemory, TierPrefix, TierResult
from asynckv.errors import ConfigError
from asynckv.stores.redis import RedisTier
from asynckv.testing.blocked import until
from asynckv.testing.tier_checks import SomeValue, open_tier
from harness.redis_servers import RedisProcess, free_port, running_redis
from harness.slow_lines import line_to

DONE, MISSING = TierResult.DONE, TierResult.MISSING
FAILED, REFUSED = TierResult.FAILED, TierResult.REFUSED
NBYTES = 300_000
"""More than comes with a header."""
LARGE_NBYTES = 6 * 2**20
"""More than is read in one piece."""


@pytest.fixture
async def tier(server: RedisProcess) -> AsyncIterator[RedisTier]:
    async with RedisTier(server.url) as tier:
        await tier.probe()
        yield tier


@pytest.fixture
async def client(server: RedisProcess) -> AsyncIterator[redis.asyncio.Redis]:
    """Somebody else, who uses the same Redis."""
    async with redis.asyncio.Redis.from_url(server.url) as client:
        yield client


async def store(
    tier: RedisTier, key: str, nbytes: int = NBYTES, seed: int = 1
) -> TierResult:
    (result,) = await tier.store([SomeValue(key, nbytes, seed).to_store()])
    return result


async def fetch(tier: RedisTier, key: str, nbytes: int = NBYTES) -> TierResult:
    """Fetch a value; what is found has to be right."""
    wanted = SomeValue(key, nbytes)
    (result,) = await tier.fetch([wanted])
    assert result is not DONE or wanted.is_one_of(1)
    return result


def lines_in(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.name.startswith("asynckv.stores") for record in caplog.records)


class Meddled(SomeValue):
    """A value that something happens to when its memory is asked for, once."""

    def __init__(
        self, key: str, nbytes: int, happens: Callable[[], Awaitable[object]]
    ) -> None:
        super().__init__(key, nbytes)
        self.is_wanted_again = True
        self._happens: Callable[[], Awaitable[object]] | None = happens

    async def place(self, header: bytes | memoryview) -> TierMemory | None:
        happens, self._happens = self._happens, None
        if happens is not None:
            await happens()
        elif not self.is_wanted_again:
            return None
        return await super().place(header)


async def test_a_server_that_was_killed_has_failed_and_one_that_is_back_is_empty(
    tier: RedisTier, server: RedisProcess
) -> None:
    assert await store(tier, "k1/a") is DONE
    await server.kill()
    assert await fetch(tier, "k1/a") is FAILED
    assert await store(tier, "k1/b") is FAILED
    assert list(await tier.delete(["k1/a"])) == [FAILED]
    assert list(await tier.contains(["k1/a"])) == [FAILED]
    with pytest.raises(OSError):
        await tier.probe()
    await server.start()
    assert await fetch(tier, "k1/a") is MISSING
    assert await store(tier, "k1/a") is DONE
    assert await fetch(tier, "k1/a") is DONE


async def test_a_server_that_was_started_anew_meanwhile_is_not_noticed(
    tier: RedisTier, server: RedisProcess
) -> None:
    assert await store(tier, "k1/a") is DONE
    assert await fetch(tier, "k1/a") is DONE
    await server.kill()
    await server.start()
    # Every lane has ended, and each call goes on by a new one.
    assert list(await tier.contains(["k1/a"])) == [MISSING]
    assert await store(tier, "k1/a") is DONE
    assert await fetch(tier, "k1/a") is DONE


async def test_a_server_that_is_killed_while_bytes_move_ends_the_calls(
    tier: RedisTier, server: RedisProcess
) -> None:
    stored = [SomeValue(f"k1/{k}", LARGE_NBYTES, 1).to_store() for k in range(8)]
    wanted = [SomeValue("k1/a", LARGE_NBYTES) for _ in range(8)]
    assert await store(tier, "k1/a", LARGE_NBYTES) is DONE
    storing = asyncio.ensure_future(tier.store(stored))
    fetching = asyncio.ensure_future(tier.fetch(wanted))
    await until(lambda: any(one.moved_nbytes for one in stored))
    await until(lambda: any(one.moved_nbytes > NBYTES for one in wanted))
    await server.kill()
    async with asyncio.timeout(10):
        assert set(await storing) <= {DONE, FAILED}
        for one, result in zip(wanted, await fetching, strict=True):
            assert result is FAILED or (result is DONE and one.is_one_of(1))
    await server.start()
    assert await store(tier, "k1/a") is DONE
    assert await fetch(tier, "k1/a") is DONE


@pytest.mark.parametrize("nbytes", [NBYTES, LARGE_NBYTES])
async def test_a_call_of_a_frozen_server_ends_and_its_memory_is_the_caller_s(
    nbytes: int, server: RedisProcess
) -> None:
    async def freeze() -> None:
        server.freeze()

    source, wanted = SomeValue("k1/a", nbytes, 1), Meddled("k1/a", nbytes, freeze)
    async with RedisTier(server.url) as tier:
        await tier.probe()
        assert await store(tier, "k1/a", nbytes) is DONE
    async with RedisTier(server.url, stall_s=0.2) as tier, asyncio.timeout(10):
        await tier.probe()
        assert list(await tier.fetch([wanted])) == [FAILED]
        assert list(await tier.store([source.to_store()])) == [FAILED]
        assert list(await tier.contains(["k1/a"])) == [FAILED]
        before = wanted.data
        source.fill(bytes(nbytes))
        server.thaw()
    async with RedisTier(server.url) as tier:
        await tier.probe()
        assert await fetch(tier, "k1/a", nbytes) is DONE
    assert wanted.data == before


async def test_closing_does_not_wait_for_a_frozen_server(server: RedisProcess) -> None:
    async with RedisTier(server.url, stall_s=60) as tier:
        await tier.probe()
        assert await store(tier, "k1/a") is DONE
        server.freeze()
        fetching = asyncio.ensure_future(fetch(tier, "k1/a"))
        storing = asyncio.ensure_future(store(tier, "k1/a", LARGE_NBYTES))
        async with asyncio.timeout(20):
            await tier.aclose()
            assert [await fetching, await storing] == [FAILED, FAILED]


async def test_another_type_under_our_key_is_missing_and_overwritten(
    tier: RedisTier, client: redis.asyncio.Redis
) -> None:
    await client.lpush("k1/a", "mine")
    assert await fetch(tier, "k1/a") is MISSING
    assert tier.statistics().unverified == 1
    assert await store(tier, "k1/a") is DONE
    assert await fetch(tier, "k1/a") is DONE


@pytest.mark.parametrize("length", [1, 1000, NBYTES - 1, NBYTES + 100, 16 * 2**20])
async def test_other_bytes_under_our_key_are_missing(
    length: int,
    tier: RedisTier,
    client: redis.asyncio.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.clear()
    await client.setrange("k1/a", length - 1, b"\0")
    for _ in range(2):
        assert await fetch(tier, "k1/a") is MISSING
    assert tier.statistics().unverified == 2
    assert lines_in(caplog) == 1


@pytest.mark.parametrize("nbytes", [100, NBYTES, LARGE_NBYTES])
@pytest.mark.parametrize("change", [-1, 1])
async def test_a_value_that_was_cut_or_went_on_is_missing(
    change: int, nbytes: int, tier: RedisTier, client: redis.asyncio.Redis
) -> None:
    assert await store(tier, "k1/a", nbytes) is DONE
    data = await client.get("k1/a")
    await client.set("k1/a", (data + b"!")[: len(data) + change])
    assert await fetch(tier, "k1/a", nbytes) is MISSING


@pytest.mark.parametrize("nbytes", [NBYTES, LARGE_NBYTES])
async def test_a_value_that_goes_while_it_is_read_is_missing(
    nbytes: int, tier: RedisTier
) -> None:
    assert await store(tier, "k1/a", nbytes) is DONE
    wanted = Meddled("k1/a", nbytes, lambda: tier.delete(["k1/a"]))
    assert list(await tier.fetch([wanted])) == [MISSING]
    assert tier.statistics().replaced == 1


@pytest.mark.parametrize("nbytes", [NBYTES, LARGE_NBYTES])
async def test_a_value_that_is_replaced_while_it_is_read_is_read_again_whole(
    nbytes: int, tier: RedisTier
) -> None:
    assert await store(tier, "k1/a", nbytes, seed=1) is DONE
    wanted = Meddled("k1/a", nbytes, lambda: store(tier, "k1/a", nbytes, seed=2))
    assert list(await tier.fetch([wanted])) == [DONE]
    assert wanted.is_one_of(2)
    assert wanted.asked == 2
    assert tier.statistics().replaced == 1
    assert await fetch(tier, "k1/b", nbytes) is MISSING


@pytest.mark.parametrize("nbytes", [NBYTES, LARGE_NBYTES])
async def test_a_lane_has_no_answer_left_of_a_value_that_became_something_else(
    nbytes: int, tier: RedisTier, client: redis.asyncio.Redis
) -> None:
    async def replace() -> None:
        await client.unlink("k1/a")
        await client.lpush("k1/a", "mine")

    await client.ping()  # it reads files when it connects
    assert await store(tier, "k1/a", nbytes) is DONE
    assert await store(tier, "k1/b", nbytes) is DONE
    wanted = Meddled("k1/a", nbytes, replace)
    assert list(await tier.fetch([wanted])) == [MISSING]
    assert [await fetch(tier, "k1/b", nbytes) for _ in range(3)] == [DONE] * 3


async def test_what_replaces_a_value_may_be_unwanted_or_of_another_length(
    tier: RedisTier,
) -> None:
    async def replace() -> None:
        await store(tier, "k1/a", NBYTES + 1, seed=2)

    async def unwant() -> None:
        await store(tier, "k1/a", NBYTES, seed=2)
        unwanted.is_wanted_again = False

    longer, unwanted = (Meddled("k1/a", NBYTES, one) for one in (replace, unwant))
    for wanted, meant in ((longer, MISSING), (unwanted, REFUSED)):
        assert await store(tier, "k1/a") is DONE
        assert list(await tier.fetch([wanted])) == [meant]
        assert list(await tier.contains(["k1/a"])) == [DONE]


async def test_a_server_without_room_keeps_what_it_has(tmp_path: Path) -> None:
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    async with running_redis(tmp_path, *options) as server:
        async with open_tier(lambda: RedisTier(server.url)) as tier:
            assert isinstance(tier, RedisTier)
            assert await store(tier, "k1/a") is DONE
            results = [await store(tier, f"k1/{k}", 2**21) for k in range(6)]
            assert results[-1] is FAILED
            assert tier.statistics().no_room == results.count(FAILED)
            assert await fetch(tier, "k1/a") is DONE


async def test_a_server_that_forgets_what_is_used_least_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru")
    async with (
        running_redis(tmp_path, *options) as server,
        open_tier(lambda: RedisTier(server.url, stall_s=20)) as tier,
    ):
        assert isinstance(tier, RedisTier)
        keys = [f"k1/{number}" for number in range(16)]
        for key in keys:
            assert await store(tier, key, 2**21) is DONE
        # Which of them it has forgotten it guesses, by a clock that counts seconds.
        assert {await fetch(tier, key, 2**21) for key in keys} == {DONE, MISSING}
    assert lines_in(caplog) == 0


async def test_a_policy_that_keeps_everything_is_warned_of_once(
    server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with RedisTier(server.url) as tier:
        for _ in range(2):
            await tier.probe()
    assert "noeviction" in caplog.text
    assert lines_in(caplog) == 1


async def test_who_speaks_no_redis_is_not_there() -> None:
    async with line_to(free_port()) as line:
        line.says = b"HTTP/1.1 400 Bad Request\r\n\r\n"
        async with RedisTier(f"redis://127.0.0.1:{line.port}") as tier:
            with pytest.raises(OSError):
                await tier.probe()
            assert await fetch(tier, "k1/a") is FAILED


@pytest.mark.parametrize(
    "says",
    [
        *(b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 20_000, b"$9999999999\r\n"),
        *(b"$many\r\n", b":\r\n", b"*1\r\n", b"$5\r\nhello, world\r\n", b"\r\n" * 3),
    ],
)
async def test_answers_that_are_none_have_failed(
    says: bytes, server: RedisProcess
) -> None:
    async with line_to(server.port) as line:
        url = f"redis://127.0.0.1:{line.port}"
        async with RedisTier(url, stall_s=0.2) as tier:
            await tier.probe()
            line.says = says
            assert await fetch(tier, "k1/a") in (FAILED, MISSING)
            assert await store(tier, "k1/a") is FAILED
            assert list(await tier.delete(["k1/a"])) == [FAILED]
            assert await tier.clear(TierPrefix("k1/")) is FAILED
            line.says = None
            assert await store(tier, "k1/a") is DONE
            assert await fetch(tier, "k1/a") is DONE


@pytest.mark.parametrize(
    "code",
    [
        *("LOADING", "READONLY", "MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN"),
        *("MASTERDOWN", "BUSY", "ERR", "NOPERM", "NOAUTH", "WRONGPASS"),
    ],
)
async def test_errors_of_a_server_have_failed(code: str, server: RedisProcess) -> None:
    async with line_to(server.port) as line:
        async with RedisTier(f"redis://127.0.0.1:{line.port}") as tier:
            await tier.probe()
            assert await store(tier, "k1/a") is DONE
            # As many as there are commands in one write, at most.
            line.says = f"-{code} 99 no\r\n".encode()
            assert await fetch(tier, "k1/a") is FAILED
            assert list(await tier.contains(["k1/a"])) == [FAILED]
            assert list(await tier.delete(["k1/a"])) == [FAILED]
            assert await store(tier, "k1/a", 100) is FAILED
            assert await tier.clear(TierPrefix("k1/")) is FAILED
            line.says = None
            assert await fetch(tier, "k1/a") is DONE


@pytest.mark.parametrize("after", [1, 100_000, 5_000_000])
async def test_a_line_that_breaks_in_an_answer_has_failed(
    after: int, server: RedisProcess
) -> None:
    async with line_to(server.port) as line:
        async with RedisTier(f"redis://127.0.0.1:{line.port}") as tier:
            await tier.probe()
            assert await store(tier, "k1/a", LARGE_NBYTES) is DONE
            line.cuts_after = after
            # A lane that was of use before is made anew, once; then the line is whole.
            assert await fetch(tier, "k1/a", LARGE_NBYTES) is FAILED
            line.cuts_after = None
            assert await fetch(tier, "k1/a", LARGE_NBYTES) is DONE


class Rotated:
    """Credentials that change."""

    password = "first"
    asked = 0

    def get_credentials(self) -> tuple[str]:
        self.asked += 1
        return (self.password,)


async def test_a_rotated_password_is_given_by_the_next_lane(tmp_path: Path) -> None:
    credentials = Rotated()
    async with running_redis(tmp_path, "--requirepass", "first") as server:
        async with RedisTier(server.url, credentials=credentials) as tier:
            await tier.probe()
            assert await store(tier, "k1/a") is DONE
            async with redis.asyncio.Redis.from_url(
                server.url, password="first"
            ) as client:
                await client.config_set("requirepass", "second")
                await client.client_kill_filter(_type="normal")
            assert await store(tier, "k1/a") is FAILED
            credentials.password = "second"
            assert await store(tier, "k1/a") is DONE
            assert await fetch(tier, "k1/a") is DONE


async def test_a_wrong_password_is_told_when_the_tier_is_opened(tmp_path: Path) -> None:
    async with running_redis(tmp_path, "--requirepass", "s3cret") as server:
        for url in (server.url, server.url.replace("://", "://:wrong@")):
            async with RedisTier(url) as tier:
                with pytest.raises(ConfigError, match="refuses us"):
                    await tier.probe()


async def test_time_to_live_is_the_shorter_of_the_value_s_and_the_tier_s(
    server: RedisProcess, client: redis.asyncio.Redis
) -> None:
    async with RedisTier(f"{server.url}?retain_s=100") as tier:
        await tier.probe()
        for expires_s, most_ms in ((None, 100_000), (50.0, 50_000), (900.0, 100_000)):
            value = SomeValue("k1/a", 100, 1).to_store()
            if expires_s is not None:
                value.expires_at_s = time.time() + expires_s
            assert list(await tier.store([value])) == [DONE]
            assert most_ms - 10_000 < await client.pttl("k1/a") <= most_ms
        value.expires_at_s = time.time() - 1
        assert list(await tier.store([value])) == [REFUSED]


async def test_a_process_has_eight_lanes_for_all_its_tiers(
    server: RedisProcess,
) -> None:
    async with RedisTier(server.url) as one, RedisTier(server.url) as two:
        await one.probe()
        await two.probe()
        async with RedisTier(server.url) as third:
            with pytest.raises(ConfigError, match="lanes"):
                await third.probe()
            await one.aclose()
            await third.probe()

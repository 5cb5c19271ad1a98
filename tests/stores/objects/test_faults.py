"""What a server or a file system does wrong is a miss, one line in the log, no more."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import obstore
import pytest
import torch
from obstore.store import ObjectStore

from asynckv.abc.tiers import TierPrefix, TierResult
from asynckv.errors import BufferClosed, ConfigError
from asynckv.stores.header import ValueName
from asynckv.stores.objects import ObjectTier
from asynckv.stores.tiered import TieredStore, open_tier
from asynckv.testing.blocked import until
from asynckv.testing.expectations import noise
from asynckv.testing.tier_checks import SomeValue
from harness.moto_server import MotoServer
from harness.s3_front import Front

MIB = 2**20
DONE, MISSING = TierResult.DONE, TierResult.MISSING
FAILED, REFUSED = TierResult.FAILED, TierResult.REFUSED
NBYTES = 5000


async def store(tier: ObjectTier) -> TierResult:
    (result,) = await tier.store([SomeValue("k1/a", NBYTES, 1).to_store()])
    return result


async def fetch(
    tier: ObjectTier, key: str = "k1/a", nbytes: int = NBYTES
) -> TierResult:
    """Fetch a value; what is found has to be right."""
    wanted = SomeValue(key, nbytes)
    (result,) = await tier.fetch([wanted])
    assert result is not DONE or wanted.is_one_of(1)
    return result


async def read(bucket: ObjectStore, path: str) -> bytes:
    found = await obstore.get_async(bucket, path)
    return bytes(await found.bytes_async())


def lines_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("asynckv.stores")
    ]


async def test_a_bucket_that_is_not_there_has_nothing(
    s3: MotoServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with ObjectTier.from_url(s3.url("kv", "nobody")) as tier:
        with pytest.raises(OSError, match="status code: 404"):
            await tier.probe()
        for _ in range(2):
            assert await fetch(tier) is MISSING
            assert await store(tier) is FAILED
        assert len(lines_in(caplog)) == 1


async def test_who_may_not_go_there_is_told_so_and_no_secret(
    s3: MotoServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    await s3.check_access(is_denied=True)
    try:
        async with ObjectTier.from_url(s3.url(prefix)) as tier:
            with pytest.raises(ConfigError, match="ListBucket") as caught:
                await tier.probe()
            assert await fetch(tier) is FAILED
            assert await store(tier) is FAILED
            assert await tier.contains(["k1/a"]) == [FAILED]
            assert await tier.delete(["k1/a"]) == [FAILED]
    finally:
        await s3.check_access(is_denied=False)
    told = str(caught.value) + caplog.text
    assert "not-to-be-told" not in told and "someone" not in told


CLOSES = b"\r\nConnection: close\r\n"
ANSWERS = {
    "slow down": b"503 Slow Down\r\nContent-Length: 5\r\n\r\nlater",
    "denied": b"403 Forbidden\r\nContent-Length: 2\r\n\r\nno",
    "cut": b"200 OK\r\nContent-Length: 5064\r\nETag: a\r\n"
    b"Last-Modified: Sat, 28 Nov 2026 00:00:00 GMT\r\n\r\nshort",
    "no length": b"200 OK\r\n\r\n",
    "redirect": b"301 Moved Permanently\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_a_wrong_answer_is_a_failure(
    answer: bytes, s3: MotoServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with fronted(s3, prefix, retries="0") as (front, tier):
        assert await store(tier) is DONE
        front.answer = b"HTTP/1.1 " + answer.replace(b"\r\n", CLOSES, 1)
        for _ in range(2):
            assert await fetch(tier) is FAILED
            assert await tier.contains(["k1/b"]) == [FAILED]
            assert await tier.clear(TierPrefix("k1/")) is FAILED
        assert len(lines_in(caplog)) == 3
        front.answer = None
        assert await fetch(tier) is DONE


async def test_what_speaks_no_http_is_a_failure(s3: MotoServer, prefix: str) -> None:
    async with fronted(s3, prefix, retries="0") as (front, tier):
        front.answer = b"-ERR unknown command\r\n"
        assert await fetch(tier) is FAILED
        assert await store(tier) is FAILED
        assert await tier.delete(["k1/a"]) == [FAILED]
        with pytest.raises(OSError, match="no answer"):
            await tier.probe()


async def test_an_answer_before_all_was_sent_lets_the_memory_go(
    s3: MotoServer, prefix: str
) -> None:
    async with fronted(s3, prefix, retries="0") as (front, tier):
        front.answer = b"HTTP/1.1 403 Forbidden" + CLOSES + b"Content-Length: 0\r\n\r\n"
        source = SomeValue("k1/a", 16 * MIB, 1)
        stored = source.to_store()
        for _ in range(5):
            assert await tier.store([stored]) == [FAILED]
        source.fill(bytes(source.nbytes))
        front.answer = None
        assert await tier.fetch([SomeValue("k1/a", 16 * MIB)]) == [MISSING]


async def test_where_versions_cannot_be_told_apart_a_large_value_is_read_all_the_same(
    s3: MotoServer, prefix: str
) -> None:
    async with fronted(s3, prefix) as (front, tier):
        value = SomeValue("k1/a", 20 * MIB, 1)
        assert await tier.store([value.to_store()]) == [DONE]
        front.hides_versions = True
        wanted = SomeValue("k1/a", 20 * MIB)
        assert await tier.fetch([wanted]) == [DONE]
        assert wanted.is_one_of(1)
        wanted.is_wanted, wanted.moved_nbytes = False, 0
        assert await tier.fetch([wanted]) == [REFUSED]
        assert wanted.moved_nbytes < 16 * MIB


@contextlib.asynccontextmanager
async def fronted(
    s3: MotoServer, prefix: str, **options: str
) -> AsyncIterator[tuple[Front, ObjectTier]]:
    async with Front(s3.port).listening() as front:
        endpoint = f"http://127.0.0.1:{front.port}"
        url = s3.url(prefix, endpoint=endpoint, **options)
        async with ObjectTier.from_url(url) as tier:
            yield front, tier


WHOLE = 8 + 64 + NBYTES


@pytest.mark.parametrize("kept", [0, 1, 8, 40, 72, WHOLE - 1, WHOLE + 1])
async def test_of_an_object_that_is_cut_or_longer_nothing_is_found(
    kept: int, s3: MotoServer, prefix: str
) -> None:
    async with ObjectTier.from_url(s3.url(prefix)) as tier:
        assert await store(tier) is DONE
        bucket, path = s3.bucket(), f"{prefix}/k1/a"
        whole = await read(bucket, path)
        assert len(whole) == WHOLE
        await obstore.put_async(bucket, path, (whole + b".")[:kept])
        assert await fetch(tier) in (MISSING, FAILED)
        assert await store(tier) is DONE
        assert await fetch(tier) is DONE


@pytest.mark.parametrize("at", [0, 7, 8, 30, -1])
async def test_a_flipped_bit_is_a_miss_and_deleted_when_it_is_read_so_twice(
    at: int, s3: MotoServer, prefix: str
) -> None:
    bucket, path = s3.bucket(), f"{prefix}/{ValueName('a').tier_key}"
    async with TieredStore(MIB, [s3.url(prefix)]) as store:
        await store.put("a", noise(NBYTES, 1))
        await store.flush()
    data = bytearray(await read(bucket, path))
    data[at] ^= 0x40
    await obstore.put_async(bucket, path, bytes(data))
    async with TieredStore(MIB, [s3.url(prefix)]) as store:
        for _ in range(2):
            found = await store.get("a")
            assert found is None or torch.equal(found, noise(NBYTES, 1))
        await store.flush()
        assert store.statistics().tiers["s3"].corrupt == (2 if at == -1 else 0)
        await store.put("a", noise(NBYTES, 2))
        assert (await store.flush())["s3"].accepted == 1


@pytest.mark.parametrize("foreign", [b"hello", bytes(300_000), b"asynckv" * 1000])
async def test_what_others_have_put_under_our_key_is_a_miss(
    foreign: bytes, s3: MotoServer, prefix: str
) -> None:
    path = f"{prefix}/{ValueName('a').tier_key}"
    await obstore.put_async(s3.bucket(), path, foreign)
    async with TieredStore(MIB, [s3.url(prefix)]) as store:
        assert await store.get("a") is None
        await store.put("a", noise(NBYTES, 1))
        await store.flush()
    async with TieredStore(MIB, [s3.url(prefix)]) as store:
        found = await store.get("a")
        assert found is not None
        assert torch.equal(found, noise(NBYTES, 1))


async def test_a_frozen_server_is_waited_for_once_and_asked_again_when_it_answers(
    s3: MotoServer, prefix: str
) -> None:
    loop = asyncio.get_running_loop()
    async with TieredStore(MIB, [s3.url(prefix, patience="0.3")]) as store:
        await store.put("a", noise(NBYTES, 1))
        await store.flush()
        s3.freeze()
        try:
            began_s = loop.time()
            assert await asyncio.gather(*map(store.get, "bcd")) == [None] * 3
            assert loop.time() - began_s >= 0.3
            assert not store.statistics().tiers["s3"].is_loading
            assert await asyncio.gather(*map(store.get, "efg")) == [None] * 3
            assert store.statistics().tiers["s3"].refused >= 3
        finally:
            s3.thaw()
        await until(lambda: store.statistics().tiers["s3"].is_loading)
        assert await store.match_prefix(["a"]) == 1


async def test_a_store_whose_server_is_frozen_is_closed_soon(
    s3: MotoServer, prefix: str
) -> None:
    try:
        async with asyncio.timeout(10):
            url = s3.url(prefix, patience="60")
            async with TieredStore(64 * MIB, [url], drain_s=0.1) as store:
                s3.freeze()
                await store.put("a", noise(16 * MIB, 1))
                getting = asyncio.ensure_future(store.get("b"))
                await until(lambda: store.statistics().tiers["s3"].waiting == 1)
            with pytest.raises(BufferClosed):
                await getting
    finally:
        s3.thaw()


async def test_a_slow_line_is_no_reason_to_give_a_server_up(
    s3: MotoServer, prefix: str
) -> None:
    keys = [f"k{number}" for number in range(4)]
    async with TieredStore(64 * MIB, [s3.url(prefix)]) as store:
        for number, key in enumerate(keys):
            await store.put(key, noise(2 * MIB, number))
        await store.flush()
    async with Front(s3.port).listening() as front:
        front.rate = 8e6
        endpoint = f"http://127.0.0.1:{front.port}"
        url = s3.url(prefix, endpoint=endpoint, patience="0.25")
        async with TieredStore(16 * MIB, [url]) as store:
            values = await asyncio.gather(*map(store.get, keys))
            assert store.statistics().tiers["s3"].late == 0
    for number, value in enumerate(values):
        assert value is not None and torch.equal(value, noise(2 * MIB, number))


async def test_a_server_that_is_killed_and_comes_back_empty_has_nothing(
    server: list[MotoServer], prefix: str
) -> None:
    url = server[0].url(prefix, skip_signature="true")
    async with TieredStore(64 * MIB, [url]) as store, TieredStore(MIB, [url]) as other:
        await store.put("a", noise(NBYTES, 1))
        await store.flush()
        await store.put("b", noise(32 * MIB, 2))
        getting = [asyncio.ensure_future(other.get("a")) for _ in range(3)]
        server[0].kill()
        for found in await asyncio.gather(*getting):
            assert found is None or torch.equal(found, noise(NBYTES, 1))
        assert [await other.get(f"c{turn}") for turn in range(5)] == [None] * 5
        await until(lambda: not other.statistics().tiers["s3"].is_loading)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            loop = asyncio.get_running_loop()
            port = server[0].port
            server.append(await loop.run_in_executor(thread, MotoServer, port))
        await until(lambda: other.statistics().tiers["s3"].is_loading)
        await other.put("a", noise(NBYTES, 3))
        assert (await other.flush())["s3"].accepted == 1


@pytest.fixture
def server() -> Iterator[list[MotoServer]]:
    pytest.importorskip("moto", reason='no S3 server here: pip install "moto[s3]"')
    servers = [MotoServer()]
    yield servers
    for one in servers:
        one.kill()


async def test_a_path_that_can_be_no_folder_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with ObjectTier.from_url(f"file://{tmp_path}/file") as tier:
        assert await store(tier) is FAILED
        assert await fetch(tier) in (MISSING, FAILED)


async def test_a_folder_where_a_value_should_be_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "k1" / "a").mkdir(parents=True)
    async with ObjectTier.from_url(f"file://{tmp_path}") as tier:
        assert await fetch(tier) in (MISSING, FAILED)
        assert await store(tier) is FAILED


async def test_a_read_that_never_returns_is_a_miss_and_keeps_nobody_from_closing(
    tmp_path: Path,
) -> None:
    path = tmp_path / ValueName("a").tier_key
    path.parent.mkdir(parents=True)
    os.mkfifo(path)  # to open it takes until somebody writes
    try:
        async with asyncio.timeout(10):
            url = f"file://{tmp_path}?patience=0.2"
            async with TieredStore(MIB, [url]) as store:
                assert await store.get("a") is None
                assert store.statistics().tiers["file"].late == 1
    finally:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


async def test_of_a_file_that_cannot_be_written_whole_nothing_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ObjectTier.from_url(f"file://{tmp_path}/kv") as tier:
        assert await store(tier) is DONE
        with files_of_at_most(2**16):
            for seed in range(2):
                value = SomeValue("k1/a", 16 * MIB, seed).to_store()
                assert await tier.store([value]) == [FAILED]
        (line,) = lines_in(caplog)
        assert "os error 27" in line
        assert await fetch(tier) is DONE


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_obstore_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for url in ("s3://bucket/kv", "file:///mnt/kv"):
        with pytest.raises(ConfigError, match="objects"):
            open_tier(url)


def test_an_url_that_says_nothing_of_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="no bucket"):
        open_tier("s3:///kv")

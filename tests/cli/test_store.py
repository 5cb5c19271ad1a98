"""``asynckv store``: what it says of values that are served, and what it removes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.cli import store as commands
from asynckv.cli.main import main
from asynckv.stores.tiered import TieredStore
from asynckv.testing.expectations import noise
from asynckv.testing.pairs import free_port
from harness.tiers import DictTier

URL = "tcp://127.0.0.1:0"


@pytest.fixture
async def store() -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("1MiB", fingerprint="llama") as store:
        await store.put("key", torch.tensor([[1, 2, 3], [4, 5, 6]]).bfloat16())
        yield store


@pytest.fixture
async def server(store: StoreBuffer) -> AsyncIterator[Server]:
    async with serve("tcp://127.0.0.1:0", store=store) as server:
        yield server


async def status_of(*arguments: str) -> int:
    """Run ``asynckv store`` in a thread, as each has a loop; return its status."""

    def run() -> int:
        with pytest.raises(SystemExit) as ended:
            main(["store", *arguments])
        return int(ended.value.code or 0)

    return await asyncio.to_thread(run)


async def test_a_value_is_written_as_it_is_in_memory(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "value")
    options = ("--out", out, "--fingerprint", "llama")
    assert await status_of("get", server.url, "key", *options) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "key: bfloat16 [2, 3], 12 bytes\n")
    data = await asyncio.to_thread((tmp_path / "value").read_bytes)
    value = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
    assert value.tolist() == [1, 2, 3, 4, 5, 6]


async def test_a_wrong_url_is_said_without_a_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await status_of("stat", "redis://me:hunter2@h:1", "key") == 1
    shown = capsys.readouterr().err
    assert "redis://me:***@h:1" in shown and "hunter2" not in shown


async def test_without_a_file_the_bytes_go_to_standard_output(
    server: Server, store: StoreBuffer, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    value = noise(1000, 1)
    await store.put("noise", value)
    options = ("--fingerprint", "llama")
    assert await status_of("get", server.url, "noise", *options) == 0
    assert capfdbinary.readouterr().out == value.numpy().tobytes()


async def test_what_is_not_there_is_said_and_has_a_status(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "value"
    options = ("--fingerprint", "llama", "--out", str(out))
    assert await status_of("get", server.url, "no\nkey", *options) == 1
    assert capsys.readouterr().err == "no\\nkey is not there\n"
    assert not await asyncio.to_thread(out.exists)


async def test_values_are_removed_and_each_is_said(
    server: Server, store: StoreBuffer, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--fingerprint", "llama")
    assert await status_of("rm", server.url, "key", "other", *options) == 1
    assert capsys.readouterr().out == "key: deleted\nother: was not there\n"
    assert await store.contains(["key"]) == (False,)


async def test_all_values_of_a_model_are_deleted_and_no_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with StoreBuffer("1MiB") as store, serve(URL, store=store) as server:
        async with connect(server.url, fingerprint="llama") as peer:
            await peer.store.put_many([(str(n), torch.ones(3)) for n in range(20)])
        await store.put("key", torch.ones(3))
        llama = ("--fingerprint", "llama")
        other = ("--fingerprint", '{"model": "llama", "dtype": "int8"}')
        for options in (other, llama, llama, ()):
            assert await status_of("clear", server.url, *options) == 0
        assert store.statistics().keys == 0
    assert capsys.readouterr().out.splitlines() == [
        f"all values put with{whose} are deleted; memory had {count}"
        for whose, count in (
            (' exactly the fingerprint {"model":"llama","dtype":"int8"}', 0),
            (" exactly the fingerprint llama", 20),
            (" exactly the fingerprint llama", 0),
            ("out a fingerprint", 1),
        )
    ]


async def test_what_others_may_not_see_they_may_not_clear(
    server: Server, store: StoreBuffer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await status_of("clear", server.url, "--fingerprint", "qwen") == 1
    assert "fingerprints differ" in capsys.readouterr().err
    assert await store.contains(["key"]) == (True,)


async def test_it_is_said_what_is_stored_and_for_how_long(
    server: Server, store: StoreBuffer, capsys: pytest.CaptureFixture[str]
) -> None:
    await store.put("other", torch.ones(3), ttl_s=1000, pin=True)
    options = ("--fingerprint", "llama")
    assert await status_of("stat", server.url, "key", "other", *options) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "key: in memory; bfloat16 [2, 3]; 12 bytes"
    assert re.fullmatch(r"other: .*; for (999|1000) s more; pinned", second)


async def test_without_a_key_it_is_said_who_serves_a_store(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await status_of("stat", server.url) == 0
    who = f"{server.url} is {server.identity.id}, which serves a store\n"
    assert capsys.readouterr().out.startswith(who)


async def test_a_server_without_a_store_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with LookupBuffer("1MiB") as lookup:
        async with serve("tcp://127.0.0.1:0", lookup=lookup) as server:
            assert await status_of("stat", server.url) == 1
    assert "asynckv store: this peer serves a lookup buffer" in capsys.readouterr().err


async def test_it_is_said_what_is_not_stored(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await status_of("stat", server.url, "key", "--fingerprint", "qwen") == 1
    assert "fingerprints differ" in capsys.readouterr().err
    options = ("--fingerprint", "llama")
    assert await status_of("stat", server.url, "key", "other", *options) == 1
    assert capsys.readouterr().out.endswith("\nother: is not there\n")


async def test_what_only_a_tier_has_is_removed_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tier = DictTier()
    async with TieredStore("1MiB", [tier], drain_s=0.1) as store:
        await store.put("key", torch.ones(3))
        await store.flush()
    async with (
        TieredStore("1MiB", [tier], drain_s=0.1) as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        assert await status_of("stat", server.url, "key") == 0
        assert await status_of("rm", server.url, "key") == 0
        await store.flush()
    assert tier.values == {}
    assert capsys.readouterr().out == "key: in DictTier\nkey: deleted\n"


async def test_another_model_s_values_are_not_there(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "value"))
    async with (
        StoreBuffer("1MiB") as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        await store.put("key", torch.ones(3))
        llama = ("--fingerprint", "llama")
        assert await status_of("get", server.url, "key", *out, *llama) == 1
        assert await status_of("get", server.url, "key", *out) == 0


async def test_nobody_there_is_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    assert await status_of("rm", url, "key") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("asynckv store: nobody listens") and shown.count("\n") == 1


async def test_a_key_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert await status_of("rm", "tcp://127.0.0.1:1") == 2
    assert "KEY" in capsys.readouterr().err
    assert commands.store.name == ("store",)

"""``asynckv ping``: who answers, how fast, and what is said when nobody does."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.cli.options import KeyOptions
from asynckv.cli.ping import ping
from asynckv.testing.pairs import free_port
from asynckv.types import KVFingerprint


@pytest.fixture
async def lookup() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer("1MiB") as lookup:
        yield lookup


@pytest.fixture
async def store() -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("1MiB") as store:
        yield store


async def pinged(url: str, **options: Any) -> int:
    """Ping from a thread, as each has a loop of its own; return the status."""
    return await asyncio.to_thread(ping, url, **options)


@pytest.mark.parametrize("what", ["a lookup buffer", "a store", "both"])
async def test_it_says_who_answers_with_what_and_how_fast(
    what: str,
    lookup: LookupBuffer,
    store: StoreBuffer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = serve(
        "tcp://127.0.0.1:0",
        lookup=None if what == "a store" else lookup,
        store=None if what == "a lookup buffer" else store,
        identity="server",
    )
    async with served as server:
        assert await pinged(server.url, count=20) == 0
    shown = capsys.readouterr()
    all_of_it = "a lookup buffer and a store" if what == "both" else what
    assert f"{server.url} is server, which serves {all_of_it}\n" in shown.out
    assert re.search(r"20 requests: p50 \d+\.\d{3} ms, p99 \d+\.\d{3} ms\n", shown.out)
    assert shown.err == ""


async def test_nobody_there_is_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    assert await pinged(url) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"asynckv ping: nobody listens at {url}")
    assert shown.err.count("\n") == 1


async def test_a_wrong_url_is_said_without_a_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await pinged("redis://me:hunter2@h:1") == 1
    shown = capsys.readouterr().err
    assert "redis://me:***@h:1" in shown and "hunter2" not in shown


async def test_who_is_refused_learns_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with (
        StoreBuffer("1MiB", fingerprint="llama") as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        assert await pinged(server.url, fingerprint=KVFingerprint("qwen")) == 1
        assert await pinged(server.url, fingerprint=KVFingerprint("llama")) == 0
    assert "asynckv ping: the fingerprints differ in 'model'" in capsys.readouterr().err


async def test_half_of_the_certificates_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = KeyOptions(ca=tmp_path)
    assert await pinged("tls://127.0.0.1:1", keys=keys) == 1
    assert "belong together" in capsys.readouterr().err


async def test_a_server_that_does_not_answer_is_not_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert await pinged(f"tcp://127.0.0.1:{port}", timeout_s=0.2) == 1
    assert "no answer within 0.2 s" in capsys.readouterr().err

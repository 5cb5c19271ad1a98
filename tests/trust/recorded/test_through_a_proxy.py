"""Whole links, cut and flipped in the middle of what they do."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import AsyncKVError
from asynckv.pipes.endpoints import PipeListener, listen_pipe, open_pipe
from asynckv.protocol import codec
from asynckv.security.tls import TLS
from asynckv.testing.blocked import until
from asynckv.testing.faults.injectors import BitFlip, CutAfter
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.pairs import Scheme, new_url

pytestmark = [pytest.mark.trust, pytest.mark.timeout(1200)]

Fault = Literal["flip", "cut"]
Kind = Literal["control", "lanes", "both"]
Way = Literal["to_listener", "to_dialler"]
HANGS_S = 10.0
PIPES = 120
SMALL = torch.arange(48, dtype=torch.int16).view(3, 16)
LARGE = torch.arange(20_000, dtype=torch.float32)


async def use(peer: Peer, salt: int) -> None:
    """Insert, take, put and get; what comes back is what was sent, or nothing does."""
    tokens = [salt, 2, 3]
    await peer.lookup.insert(tokens, None, SMALL + salt, LARGE + salt, None)
    async with peer.lookup.drop_select(tokens) as entry:
        assert entry.input_tokens is not None
        assert entry.input_tokens.tolist() == tokens
        assert isinstance(entry.key, torch.Tensor)
        assert isinstance(entry.value, torch.Tensor)
        assert torch.equal(entry.key, SMALL + salt)
        assert torch.equal(entry.value, LARGE + salt)
    await peer.store.put("name", SMALL - salt)
    got = await peer.store.get("name")
    assert got is not None
    assert got.dtype == SMALL.dtype
    assert torch.equal(got, SMALL - salt)


async def meet(url: str, salt: int, **options: Any) -> str:
    """Use a server, and return by which documented error that ended, if by one."""
    try:
        async with (
            asyncio.timeout(HANGS_S),
            connect(url, lanes=1, **options) as peer,
        ):
            await use(peer, salt)
    except AsyncKVError as exc:
        return type(exc).__name__
    return ""


async def meet_badly(
    server: Server, fault: Fault, rng: random.Random, salt: int, **options: Any
) -> str:
    kind: Kind = rng.choice(("control", "lanes"))
    way: Way = rng.choice(("to_listener", "to_dialler"))
    at = rng.randrange(LARGE.nbytes if kind == "lanes" else 1600)
    if server.url.startswith("tls"):
        kind = "both"  # nobody in the middle can tell
    flip = BitFlip(at, bit=rng.randrange(8), direction=way, kind=kind)
    cut = CutAfter(at, direction=way, kind=kind)
    async with Proxy(server.url) as proxy:
        with proxy.add(flip if fault == "flip" else cut):
            return await meet(
                proxy.url, salt, reconnect_s=rng.choice((0, 5)), **options
            )


@contextlib.asynccontextmanager
async def serving(scheme: Scheme, **options: Any) -> AsyncIterator[Server]:
    """Serve buffers that must hold nothing of anybody in the end."""
    async with (
        LookupBuffer("128MiB", drain_s=0) as lookup,
        StoreBuffer("8MiB") as store,
        serve(new_url(scheme), lookup=lookup, store=store, **options) as server,
    ):
        yield server
        await until(lambda: not server.peers)
        told = lookup.statistics()
    assert (told.leased, told.waiting_selects, told.waiting_inserts) == (0, 0, 0)


@pytest.mark.parametrize("fault", ["flip", "cut"])
@pytest.mark.parametrize(("scheme", "one_in"), [("tcp", 1), ("unix", 2), ("tls", 4)])
async def test_what_comes_back_through_a_bad_connection_is_right_or_an_error(
    scheme: Scheme,
    one_in: int,
    fault: Fault,
    scale: Any,
    tls: TLS,
    caplog: pytest.LogCaptureFixture,
    figures: Callable[[str], None],
) -> None:
    count = scale.bad_connections // one_in
    rng = random.Random(f"{scheme} {fault}")
    options = {"tls": tls} if scheme == "tls" else {}
    async with serving(scheme, **options) as server:
        ends = [
            await meet_badly(server, fault, rng, salt, **options)
            for salt in range(count)
        ]
        assert await meet(server.url, count, **options) == ""
    figures(f"{count} links, of which {sum(map(bool, ends))} ended by an error")
    assert count // 8 < sum(map(bool, ends))
    assert not [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]


class Anything(int):
    """A checksum that fits everything."""

    def __ne__(self, other: object) -> bool:
        return False


async def test_without_checksums_wrong_bytes_would_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "HANGS_S", 1.0)
    monkeypatch.setattr(codec, "checksum_of", lambda *_: Anything())
    monkeypatch.setattr(codec, "xxh3", lambda *_: Anything())
    rng = random.Random(1)
    with pytest.raises(AssertionError):
        async with serving("tcp") as server:
            for salt in range(2000):
                with contextlib.suppress(TimeoutError, ValueError, KeyError):
                    await meet_badly(server, "flip", rng, salt)


async def carry(
    listener: PipeListener,
    url: str,
    sent: list[torch.Tensor | None],
    got: list[torch.Tensor | None],
) -> str:
    """Send through a pipe; return by which documented error that ended, if by one."""

    accepted = asyncio.Event()

    async def receive() -> None:
        async with await listener.accept() as far:
            accepted.set()
            async for tensor in far:
                got.append(tensor)  # noqa: PERF401 - what came before an error counts

    receiving = asyncio.create_task(receive())
    end = ""
    try:
        async with asyncio.timeout(HANGS_S), open_pipe(url, lanes=1) as near:
            for tensor in sent:
                await near.send_tensor(tensor)
    except AsyncKVError as exc:
        end = type(exc).__name__
    if end and not accepted.is_set():
        receiving.cancel()  # it failed in the greeting
    _, hanging = await asyncio.wait({receiving}, timeout=HANGS_S)
    assert not hanging
    if not receiving.cancelled() and (error := receiving.exception()) is not None:
        assert isinstance(error, AsyncKVError)
        end = end or type(error).__name__
    return end


async def test_a_pipe_over_a_bad_connection_gives_the_first_tensors_or_an_error() -> (
    None
):
    rng, sent = random.Random(5), [SMALL, LARGE, None, SMALL + 1]
    ends = []
    async with listen_pipe("tcp://127.0.0.1:0", lanes=1) as listener:
        for _ in range(PIPES):
            got: list[torch.Tensor | None] = []
            async with Proxy(listener.url) as proxy:
                at = rng.randrange(LARGE.nbytes if rng.random() < 0.5 else 1000)
                with proxy.bit_flip(at, bit=rng.randrange(8)):
                    ends.append(await carry(listener, proxy.url, sent, got))
            for tensor, expected in zip(got, sent, strict=False):
                if tensor is None or expected is None:
                    assert tensor is expected
                else:
                    assert torch.equal(tensor, expected)
            assert ends[-1] or len(got) == len(sent)
    assert PIPES // 8 < sum(map(bool, ends))

from __future__ import annotations

import asyncio
import importlib.util
import sys
from typing import Any

import pytest
import torch

import asynckv
from asynckv.errors import ConfigError, EndOfStream, GPUUnavailable, PeerLost
from asynckv.pipes import endpoints as opening
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing import (
    CancelMode,
    Outcome,
    sweep_cancellation,
    until,
    until_blocked,
)
from asynckv.testing.pairs import SCHEMES, Scheme, new_url

pytestmark = pytest.mark.both_loops


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls": object()}, "TLS"),
        ({"device": "tpu"}, "'tpu' is unknown"),
        ({"device": torch.device("meta")}, "meta"),
        ({"digest": "foo"}, "digest='foo'"),
        ({"lanes": True}, "True lanes"),
    ],
)
@pytest.mark.parametrize("opened", [open_pipe, listen_pipe])
def test_options_that_cannot_be_honoured_are_refused(
    opened: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened("tcp://127.0.0.1:0", **options)


async def test_the_largest_number_is_no_bound() -> None:
    async with listen_pipe("tcp://127.0.0.1:0", max_bytes=sys.maxsize) as listener:
        async with open_pipe(listener.url, max_bytes=sys.maxsize) as near:
            async with await listener.accept() as far:
                await near.send_tensor(torch.ones(3))
                found = await far.recv_tensor()
                assert found is not None and found.shape == (3,)
                await far.send_tensor(torch.zeros(2**18))
                found = await near.recv_tensor()
                assert found is not None and found.shape == (2**18,)


def test_the_cpu_may_be_named() -> None:
    listen_pipe("mem://", device="cpu")
    listen_pipe("mem://", device=torch.device("cpu"))


@pytest.mark.skipif(
    importlib.util.find_spec("cupy") is not None, reason="CuPy is installed"
)
@pytest.mark.parametrize("opened", [open_pipe, listen_pipe])
async def test_a_gpu_that_cannot_be_reached_is_told_on_entering(opened: Any) -> None:
    with pytest.raises(GPUUnavailable, match="CuPy is not installed"):
        async with opened("tcp://127.0.0.1:0", device="cuda"):
            pass


async def test_nobody_listening_is_told() -> None:
    with pytest.raises(PeerLost, match="nobody listens"):
        async with open_pipe("tcp://127.0.0.1:1"):
            pass


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_pipes_are_accepted_in_the_order_in_which_they_came(
    scheme: Scheme,
) -> None:
    async with (
        listen_pipe(new_url(scheme), lanes=1) as listener,
        open_pipe(listener.url) as first,
        open_pipe(listener.url) as second,
    ):
        for number, pipe in enumerate((first, second)):
            await pipe.send_tensor(torch.tensor(number))
        for number in range(2):
            async with await listener.accept() as accepted:
                assert await accepted.recv_tensor() == torch.tensor(number)


async def test_nothing_is_received_for_a_pipe_that_nobody_has_accepted() -> None:
    async with (
        listen_pipe("mem://") as listener,
        open_pipe(listener.url) as pipe,
    ):
        await pipe.send_tensor(torch.ones(3))
        flushing = asyncio.create_task(pipe.flush())
        await until_blocked(flushing)
        assert not flushing.done()
        async with await listener.accept():
            await flushing


async def test_those_who_accept_are_served_in_turn() -> None:
    async with listen_pipe("mem://") as listener:
        tasks = [asyncio.create_task(listener.accept()) for _ in range(3)]
        await until_blocked(*tasks)
        tasks[0].cancel()
        async with open_pipe(listener.url) as first, open_pipe(listener.url):
            await first.send_tensor(torch.ones(1))
            async with await tasks[1] as one, await tasks[2]:
                assert await one.recv_tensor() == torch.ones(1)


async def test_a_pipe_that_went_away_is_not_accepted() -> None:
    async with listen_pipe("mem://") as listener:
        async with open_pipe(listener.url):
            pass
        async with open_pipe(listener.url) as pipe, await listener.accept() as far:
            await pipe.send_tensor(None)
            assert await far.recv_tensor() is None


async def test_closing_the_listener_leaves_accepted_pipes_alone() -> None:
    async with listen_pipe("tcp://127.0.0.1:0", lanes=1) as listener:
        async with open_pipe(listener.url) as near, await listener.accept() as far:
            await listener.aclose()
            await near.send_tensor(torch.ones(1))
            assert await far.recv_tensor() == torch.ones(1)


async def test_closing_the_listener_cuts_what_nobody_accepted() -> None:
    async with (
        listen_pipe("tcp://127.0.0.1:0", lanes=1) as listener,
        open_pipe(listener.url) as near,
    ):
        await until(lambda: bool(listener._waiting))
        await listener.aclose()
        with pytest.raises(PeerLost):
            await near.recv_tensor()


@pytest.mark.parametrize("abort", [False, True])
async def test_a_closed_listener_accepts_no_more(abort: bool) -> None:
    async with listen_pipe("mem://") as listener:
        waiting = asyncio.create_task(listener.accept())
        await until_blocked(waiting)
        if abort:
            listener.abort()
        else:
            await listener.aclose()
        for call in (waiting, listener.accept()):
            with pytest.raises(EndOfStream):
                await call


async def test_only_so_many_wait_to_be_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "_MAX_WAITING", 1)
    async with (
        listen_pipe("mem://") as listener,
        open_pipe(listener.url),
        open_pipe(listener.url) as second,
    ):
        with pytest.raises(PeerLost, match="wait to be accepted"):
            await second.recv_tensor()


async def test_a_listener_for_pipes_serves_nothing_else() -> None:
    async with listen_pipe("mem://") as listener, asynckv.connect(listener.url) as peer:
        with pytest.raises(ConfigError, match="serves no buffer: use open_pipe"):
            await peer.lookup.withdraw("entry")


async def test_a_listener_has_an_address_once_it_is_entered_and_only_once() -> None:
    listener = listen_pipe("mem://")
    with pytest.raises(RuntimeError, match="no address"):
        _ = listener.url
    with pytest.raises(RuntimeError, match="enter the listener"):
        await listener.accept()
    async with listener:
        with pytest.raises(RuntimeError, match="entered before"):
            await listener.__aenter__()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_cancelled_opening_leaves_nothing_behind(scheme: Scheme) -> None:
    async def open_and_close() -> None:
        async with open_pipe(listener.url, lanes=2) as pipe:
            await pipe.send_tensor(None)
            async with await listener.accept() as far:
                await far.recv_tensor()

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        # Whoever went away before it was accepted is passed over.
        await open_and_close()

    async with listen_pipe(new_url(scheme), lanes=2) as listener:
        await sweep_cancellation(open_and_close, check)


async def test_a_cancelled_accept_has_taken_nothing() -> None:
    dialled: list[asyncio.Task[None]] = []

    async def dial() -> None:
        async with open_pipe(listener.url) as pipe:
            assert await pipe.recv_tensor() is None

    async def before() -> None:
        dialled.append(asyncio.create_task(dial()))

    async def check(k: int, mode: CancelMode, outcome: Outcome[Pipe]) -> None:
        async with outcome.value or await listener.accept() as pipe:
            await pipe.send_tensor(None)
        await dialled.pop()

    modes: tuple[CancelMode, ...] = ("task", "scope", "completion")
    async with listen_pipe("tcp://127.0.0.1:0", lanes=1) as listener:
        await sweep_cancellation(listener.accept, check, before=before, modes=modes)

"""Pipes while everything goes wrong that has a name: what came is what was sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import asynckv
from asynckv.pipes.endpoints import PipeListener
from asynckv.testing.faults.fault import Direction, Fault
from asynckv.testing.faults.proxy import Proxy

Make = Callable[[Proxy], Fault]

SENT: Sequence[torch.Tensor | None] = (
    torch.arange(10),
    torch.arange(20_000),
    None,
    torch.empty(0),
    torch.arange(9_000),
    torch.tensor(7.5),
)

HARMLESS: dict[str, Make] = {
    "latency": lambda proxy: proxy.latency(0.01),
    "rate": lambda proxy: proxy.rate(5e6),
    "slices of the control": lambda proxy: proxy.tiny_slices(kind="control"),
    "slices of the payload": lambda proxy: proxy.tiny_slices(999, kind="lanes"),
}
DEADLY: dict[str, Make] = {
    "reset": lambda proxy: proxy.reset(),
    "reset of lanes": lambda proxy: proxy.reset(kind="lanes"),
    "black hole": lambda proxy: proxy.black_hole(),
    "black hole there": lambda proxy: proxy.black_hole(direction="to_listener"),
    "black hole back": lambda proxy: proxy.black_hole(direction="to_dialler"),
    "stall": lambda proxy: proxy.stall(),
    "half close": lambda proxy: proxy.half_close(kind="control"),
    "half close back": lambda proxy: proxy.half_close("to_dialler", kind="control"),
    "half close of lanes": lambda proxy: proxy.half_close(kind="lanes"),
}


class Account:
    """What one side sent, what the other received, and how either ended."""

    def __init__(self) -> None:
        self.came: list[torch.Tensor | None] = []
        self.accepted = False
        self.sender: Exception | None = None
        self.receiver: Exception | None = None

    async def send(self, url: str) -> None:
        try:
            async with asynckv.open_pipe(url, lanes=1) as pipe:
                for tensor in SENT:
                    await pipe.send_tensor(tensor)
                await pipe.flush()
        except asynckv.AsyncKVError as exc:
            self.sender = exc

    async def receive(self, listener: PipeListener) -> None:
        try:
            async with await listener.accept() as pipe:
                self.accepted = True
                async for tensor in pipe:
                    self.came.append(tensor)
        except asynckv.AsyncKVError as exc:
            self.receiver = exc

    def check(self) -> None:
        """What came is the beginning of what was sent, and all of it if all is well."""
        for came, sent in zip(self.came, SENT, strict=False):
            assert (came is None) == (sent is None)
            if came is not None and sent is not None:
                assert torch.equal(came, sent)
        if self.sender is None or (self.accepted and self.receiver is None):
            assert len(self.came) == len(SENT)


async def use(make: Make) -> tuple[Account, Fault]:
    """Send, and receive, while the fault is on."""
    account = Account()
    async with (
        asynckv.listen_pipe("tcp://127.0.0.1:0", lanes=1) as listener,
        Proxy(listener.url) as proxy,
    ):
        receiving = asyncio.create_task(account.receive(listener))
        with make(proxy) as fault:
            async with asyncio.timeout(20):
                await account.send(proxy.url)
                if account.accepted:
                    await receiving
        receiving.cancel()
        await asyncio.wait({receiving})
    account.check()
    return account, fault


@pytest.mark.parametrize("name", HARMLESS)
async def test_everything_arrives_under(name: str) -> None:
    account, fault = await use(HARMLESS[name])
    assert (account.sender, account.receiver) == (None, None)
    assert fault.counts.acts


@pytest.mark.parametrize("direction", ["to_listener", "to_dialler"])
@pytest.mark.parametrize("at", range(0, 1300, 97))
@pytest.mark.parametrize("damage", ["cut", "flip"])
async def test_damage_to_the_control_connection_loses_nothing_silently(
    damage: str, at: int, direction: Direction
) -> None:
    def make(proxy: Proxy) -> Fault:
        where: Any = {"direction": direction, "kind": "control"}
        if damage == "cut":
            return proxy.cut_after(at, **where)
        return proxy.bit_flip(at, bit=at % 8, **where)

    account, fault = await use(make)
    if account.sender or account.receiver:
        assert fault.counts.acts


@pytest.mark.parametrize("nbytes", [0, 30, 48, 100, 70_000, 200_000])
async def test_a_cut_of_a_lane_is_an_error_on_both_sides(nbytes: int) -> None:
    account, fault = await use(lambda p: p.cut_after(nbytes, kind="lanes"))
    assert fault.counts.acts
    assert isinstance(account.sender, asynckv.PeerLost)
    assert isinstance(account.receiver, asynckv.PeerLost | None)


@pytest.mark.parametrize("at", [150, 1000, 160_000, 200_000])
async def test_a_flip_in_the_payload_is_found_before_it_is_handed_over(at: int) -> None:
    account, _ = await use(lambda p: p.bit_flip(at, kind="lanes"))
    assert isinstance(account.sender, asynckv.PipeBroken)
    assert isinstance(account.receiver, asynckv.ChecksumError | asynckv.PeerLost), (
        account.receiver
    )


@pytest.mark.parametrize("name", DEADLY)
async def test_both_sides_are_told_of(name: str) -> None:
    async with (
        asyncio.timeout(10),
        asynckv.listen_pipe("tcp://127.0.0.1:0", lanes=1) as listener,
        Proxy(listener.url, heartbeat_ms=60) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        near = await stack.enter_async_context(asynckv.open_pipe(proxy.url, lanes=1))
        far = await listener.accept()
        stack.callback(far.abort)
        stack.callback(near.abort)
        fault = DEADLY[name](proxy)
        fault.begin()
        sending = asyncio.create_task(send_for_ever(near))
        with pytest.raises(asynckv.PeerLost):
            async for _ in far:
                pass
        with pytest.raises(asynckv.PipeBroken):
            await sending
        assert fault.counts.acts


async def send_for_ever(pipe: asynckv.KVPipe) -> None:
    while True:
        await pipe.send_tensor(torch.arange(20_000))

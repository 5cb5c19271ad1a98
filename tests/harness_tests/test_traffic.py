"""Lookup buffers while everything goes wrong that has a name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.testing.blocked import until
from asynckv.testing.faults.fault import Fault
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.pairs import Scheme, new_url, open_kv_pair
from harness.crowd import Attendance, besiege
from harness.traffic import Traffic

Make = Callable[[Proxy], Sequence[Fault]]

LASTING: dict[str, Make] = {
    "no fault": lambda proxy: [],
    "latency": lambda proxy: [proxy.latency(0.005)],
    "rate": lambda proxy: [proxy.rate(20e6)],
    "tiny slices": lambda proxy: [
        proxy.tiny_slices(11, kind="control"),
        proxy.tiny_slices(5_000, kind="lanes"),
    ],
    "cuts in control": lambda proxy: [
        proxy.cut_after(nbytes, times=3, kind="control") for nbytes in (777, 999, 1234)
    ],
    "cuts in payload": lambda proxy: [proxy.cut_after(30_000, times=4, kind="lanes")],
    "flips in control": lambda proxy: [
        proxy.bit_flip(seed=1, every_bytes=1_000, times=12, kind="control")
    ],
    "flips in payload": lambda proxy: [
        proxy.bit_flip(seed=2, every_bytes=100_000, times=12, kind="lanes")
    ],
}
PULSING: dict[str, tuple[float, float, Make]] = {
    "reset": (0.01, 0.1, lambda proxy: [proxy.reset()]),
    "reset of lanes": (0.01, 0.1, lambda proxy: [proxy.reset(kind="lanes")]),
    "black hole": (0.35, 0.3, lambda proxy: [proxy.black_hole()]),
    "black hole of lanes": (0.2, 0.3, lambda proxy: [proxy.black_hole(kind="lanes")]),
    "short stall": (0.1, 0.1, lambda proxy: [proxy.stall()]),
    "long stall": (0.4, 0.3, lambda proxy: [proxy.stall()]),
    "half close": (0.01, 0.1, lambda proxy: [proxy.half_close()]),
    "half close back": (0.01, 0.1, lambda proxy: [proxy.half_close("to_dialler")]),
    "half close of lanes": (
        0.01,
        0.1,
        lambda proxy: [proxy.half_close("both", kind="lanes")],
    ),
}


@contextlib.asynccontextmanager
async def served(scheme: Scheme = "tcp") -> AsyncIterator[tuple[LookupBuffer, Proxy]]:
    async with (
        LookupBuffer("8MiB", drain_s=0, max_deliver=10_000) as lookup,
        serve(new_url(scheme), lookup=lookup, lanes=2) as server,
        Proxy(server.url, heartbeat_ms=80) as proxy,
    ):
        yield lookup, proxy


def judge(lookup: LookupBuffer, traffic: Traffic, count: int) -> None:
    """Nothing was wrong, nothing was lost, and nothing is left."""
    assert traffic.wrong == []
    assert set(traffic.seen) == set(range(count))
    assert set(traffic.errors) <= {
        "PeerLost",
        "LeaseLost",
        "ChecksumError",
        "RemoteProtocolError",
        "LocalProtocolError",
    }
    found = lookup.statistics()
    assert (found.acknowledged, found.entries, found.used_bytes) == (count, 0, 0)


@pytest.mark.parametrize("fault", LASTING)
async def test_nothing_is_wrong_or_lost_under(fault: str) -> None:
    async with served() as (lookup, proxy), contextlib.AsyncExitStack() as stack:
        faults = [stack.enter_context(fault) for fault in LASTING[fault](proxy)]
        traffic = Traffic(lookup, proxy.url)
        async with asyncio.timeout(40):
            await traffic.run(12)
        judge(lookup, traffic, 12)
        assert all(fault.counts.acts for fault in faults)


async def pulse(faults: Sequence[Fault], on_s: float, off_s: float) -> None:
    while True:
        with contextlib.ExitStack() as stack:
            for fault in faults:
                stack.enter_context(fault)
            await asyncio.sleep(on_s)
        await asyncio.sleep(off_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "fault"),
    [
        *(pytest.param("tcp", fault, marks=pytest.mark.chaos) for fault in PULSING),
        *(("unix", fault) for fault in ("reset", "long stall")),
    ],
)
async def test_nothing_is_wrong_or_lost_while_it_comes_and_goes(
    scheme: Scheme, fault: str
) -> None:
    on_s, off_s, make = PULSING[fault]
    async with served(scheme) as (lookup, proxy):
        faults = make(proxy)
        pulsing = asyncio.create_task(pulse(faults, on_s, off_s))
        traffic = Traffic(lookup, proxy.url)
        try:
            async with asyncio.timeout(40):
                await traffic.run(24)
        finally:
            pulsing.cancel()
        judge(lookup, traffic, 24)
        assert all(fault.counts.acts for fault in faults)


async def test_a_crowd_comes_in_every_way_and_goes_when_it_is_cancelled() -> None:
    async with open_kv_pair("tcp") as pair:
        there = Attendance()
        siege = asyncio.create_task(besiege(pair.server.url, 16, there))
        await until(lambda: len(pair.server.peers) > 3 and there.now > 3)
        await pair.peer.lookup.insert([1], None, torch.ones(1), None, None)
        assert (await pair.peer.lookup.drop_select([1])).nbytes == 12
        siege.cancel()
        await asyncio.wait({siege})
        assert there.now == 0
        await until(lambda: len(pair.server.peers) == 1)

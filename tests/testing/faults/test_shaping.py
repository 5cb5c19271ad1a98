from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.faults.raw import RawConnection
from asynckv.testing.faults.shaping import Latency, Rate, TinySlices

Join = Callable[..., Awaitable[tuple[RawConnection, RawConnection]]]
Carry = Callable[[RawConnection, RawConnection, bytes], Awaitable[bytes]]


async def test_latency_delays_each_byte_and_keeps_what_follows_flowing(
    join: Join, proxy: Proxy
) -> None:
    loop, (near, far) = asyncio.get_running_loop(), await join()
    with proxy.latency(0.1, direction="to_listener") as fault:
        begin = loop.time()
        for number in range(5):
            await near.send(bytes([number]))
            await asyncio.sleep(0)
        assert await far.receive(5) == bytes(range(5))
        taken_s = loop.time() - begin
    assert 0.0999 <= taken_s < 0.4  # not 5 times as long
    assert fault.counts.nbytes == 5


async def test_the_end_of_a_latency_sends_on_what_it_holds(
    join: Join, proxy: Proxy
) -> None:
    near, far = await join()
    with proxy.latency(3600):
        await near.send(b"held")
        near.finish()
        receiving = asyncio.create_task(far.receive(5))
        await until(lambda: proxy.counts.max_held_bytes == 4)
        await until_blocked(receiving)
        assert not receiving.done()
    assert await receiving == b"held"


async def test_a_rate_is_shared_by_all_connections(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    loop, pairs = asyncio.get_running_loop(), [await join() for _ in range(2)]
    data = os.urandom(20_000)
    with proxy.rate(200_000) as fault:
        begin = loop.time()
        came = await asyncio.gather(*(carry(*pair, data) for pair in pairs))
        taken_s = loop.time() - begin
    assert came == [data, data]
    assert 0.18 < taken_s < 1
    assert fault.counts.nbytes == 40_000
    assert fault.counts.connections == 2


async def test_a_rate_below_a_byte_a_turn_trickles(join: Join, proxy: Proxy) -> None:
    near, far = await join()
    with proxy.rate(50) as fault:
        await near.send(b"1234")
        assert await far.receive_some() == b"1"
        assert await far.receive_some() == b"2"
    assert await far.receive(2) == b"34"
    assert fault.counts.acts == 2


async def test_tiny_slices_go_on_one_by_one(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
    with proxy.tiny_slices(3) as fault:
        assert await carry(near, far, b"1234567") == b"1234567"
    assert (fault.counts.acts, fault.counts.nbytes) == (3, 7)
    assert len(await carry(near, far, bytes(2**17))) == 2**17
    assert fault.counts.acts == 3


async def test_a_stall_loses_nothing(join: Join, carry: Carry, proxy: Proxy) -> None:
    near, far = await join()
    data = os.urandom(8 * 2**20)
    with proxy.stall(direction="to_listener") as fault:
        sending = asyncio.create_task(near.send(data))
        await fault.acted()
        assert await carry(far, near, b"the other way") == b"the other way"
        await until_blocked(sending)
        assert not sending.done()
    assert await far.receive(len(data)) == data
    await sending
    assert fault.counts.acts == 1


def test_what_cannot_be_is_refused() -> None:
    for make in (lambda: Latency(-1), lambda: Rate(0), lambda: TinySlices(0)):
        with pytest.raises(ValueError):
            make()

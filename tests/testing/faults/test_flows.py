from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from asynckv.testing.blocked import until
from asynckv.testing.faults.flows import MAX_LINE_BYTES
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.faults.raw import RawConnection

Join = Callable[..., Awaitable[tuple[RawConnection, RawConnection]]]
Carry = Callable[[RawConnection, RawConnection, bytes], Awaitable[bytes]]


async def test_bytes_pass_both_ways_as_they_are(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
    data = os.urandom(3 * 2**20)
    assert await carry(near, far, data) == data
    assert await carry(far, near, data[:1000]) == data[:1000]
    counts = proxy.counts
    assert (counts.bytes_to_listener, counts.bytes_to_dialler) == (len(data), 1000)


async def test_who_does_not_read_makes_the_sender_wait(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
    data = os.urandom(2**20)
    sending = asyncio.create_task(near.send(64 * data))
    await until(lambda: proxy.counts.max_held_bytes >= MAX_LINE_BYTES)
    passed = proxy.counts.bytes_to_listener
    assert not sending.done()
    assert await carry(far, near, data) == data  # the other way is free
    assert await far.receive(64 * len(data)) == 64 * data
    await sending
    assert passed < 32 * 2**20
    assert proxy.counts.max_held_bytes < MAX_LINE_BYTES + 2**16


async def test_the_end_of_one_direction_leaves_the_other(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
    await near.send(b"last")
    near.finish()
    assert await far.receive(5) == b"last"
    assert await carry(far, near, b"answer") == b"answer"
    assert proxy.open_connections == 1
    far.finish()
    assert await near.receive(1) == b""
    await until(lambda: not proxy.open_connections)


@pytest.mark.parametrize("who", ["near", "far"])
async def test_a_reset_is_passed_on(join: Join, proxy: Proxy, who: str) -> None:
    ends = await join()
    breaking, hearing = ends if who == "near" else reversed(ends)
    breaking.close(resets=True)
    with pytest.raises(ConnectionResetError):
        await hearing.receive(1)
    assert proxy.open_connections == 0


async def test_who_has_gone_resets_who_still_sends(join: Join, proxy: Proxy) -> None:
    near, far = await join()
    far.close()
    assert await near.receive(1) == b""
    with pytest.raises(OSError):
        while True:
            await near.send(bytes(2**16))
            await asyncio.sleep(0)
    await until(lambda: not proxy.open_connections)


async def test_a_line_of_single_bytes_is_bounded_too(join: Join, proxy: Proxy) -> None:
    near, far = await join()
    with proxy.stall():
        (passage,) = proxy._passages
        line, sent = passage._flows[0]._line, 0
        while len(line) < 4096:
            sent += near.send_nowait(b"1")
            await asyncio.sleep(0)
        await near.send(bytes(2**16))
        assert len(line) == 4096
    assert await far.receive(sent + 2**16) == sent * b"1" + bytes(2**16)

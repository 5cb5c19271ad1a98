from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable

import pytest

from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.faults.fault import MAX_LINE_BYTES, Fault
from asynckv.testing.faults.hostile import RawConnection
from asynckv.testing.faults.injectors import (
    BitFlip,
    CutAfter,
    Latency,
    Rate,
    Stall,
    TinySlices,
)
from asynckv.testing.faults.proxy import Proxy

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
    near: RawConnection, far: RawConnection, proxy: Proxy
) -> None:
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


async def test_a_rate_below_a_byte_a_turn_trickles(
    near: RawConnection, far: RawConnection, proxy: Proxy
) -> None:
    with proxy.rate(50) as fault:
        await near.send(b"1234")
        assert await far.receive_some() == b"1"
        assert await far.receive_some() == b"2"
    assert await far.receive(2) == b"34"
    assert fault.counts.acts == 2


async def test_tiny_slices_go_on_one_by_one(
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy
) -> None:
    with proxy.tiny_slices(3) as fault:
        assert await carry(near, far, b"1234567") == b"1234567"
    assert (fault.counts.acts, fault.counts.nbytes) == (3, 7)
    assert len(await carry(near, far, bytes(2**17))) == 2**17
    assert fault.counts.acts == 3


async def test_a_stall_loses_nothing(
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy
) -> None:
    data = os.urandom(2**20) * 24  # more than the system keeps of it
    with proxy.stall(direction="to_listener") as fault:
        sending = asyncio.create_task(near.send(data))
        await fault.acted()
        assert await carry(far, near, b"the other way") == b"the other way"
        await until_blocked(sending)
        assert not sending.done()
    assert await far.receive(len(data)) == data
    await sending
    assert fault.counts.acts == 1


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 200_000])
async def test_exactly_so_many_bytes_pass_before_a_cut_from_its_begin_on(
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy, nbytes: int
) -> None:
    assert await carry(near, far, bytes(100)) == bytes(100)
    with proxy.cut_after(nbytes) as fault:
        assert len(await carry(near, far, bytes(300_000))) == nbytes
    assert fault.counts.acts == 1
    assert proxy.open_connections == 0


async def test_only_as_many_connections_are_cut(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    with proxy.cut_after(2, times=2) as fault:
        came = [len(await carry(*await join(), bytes(9))) for _ in range(4)]
    assert came == [2, 2, 9, 9]
    assert (fault.counts.acts, fault.counts.connections) == (2, 4)


async def test_a_cut_is_an_end_though_the_proxy_had_more_to_read(
    near: RawConnection, far: RawConnection, proxy: Proxy
) -> None:
    with (
        proxy.stall(direction="to_dialler"),
        proxy.cut_after(4, direction="to_listener"),
    ):
        await far.send(bytes(MAX_LINE_BYTES + 2**18))
        await until(lambda: proxy.counts.max_held_bytes >= MAX_LINE_BYTES)
        await near.send(b"12345")
        assert await far.receive(5) == b"1234"


async def test_a_cut_can_be_a_reset(
    near: RawConnection, far: RawConnection, proxy: Proxy
) -> None:
    with proxy.cut_after(4, resets=True, direction="to_dialler"):
        await near.send(bytes(100))
        assert await far.receive(100) == bytes(100)
        await far.send(b"12345")
        with pytest.raises(ConnectionResetError):
            await near.receive(5)
        with pytest.raises(ConnectionResetError):
            await far.receive(1)


async def test_a_reset_ends_what_is_open_and_what_is_opened(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    open_before = await join()
    with proxy.reset() as fault:
        for end in open_before:
            with pytest.raises(ConnectionResetError):
                await end.receive(1)
        near, _ = await join()
        with pytest.raises(ConnectionResetError):
            await near.receive(1)
    assert fault.counts.acts == 2
    assert await carry(*await join(), b"as before") == b"as before"


async def test_a_reset_also_ends_what_is_blocked(join: Join, proxy: Proxy) -> None:
    near, _ = await join()
    sending = asyncio.create_task(near.send(bytes(2**26)))
    await until(lambda: proxy.counts.max_held_bytes >= 2**20)
    with proxy.reset() as fault:
        await fault.acted()
    with pytest.raises(ConnectionResetError):
        await sending


async def test_a_half_close_ends_one_direction(
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy
) -> None:
    with proxy.half_close("to_listener") as fault:
        assert await far.receive(1) == b""
        await near.send(bytes(2**20))  # read and dropped
        assert await carry(far, near, b"the other way") == b"the other way"
    assert await far.receive(1) == b""
    near.finish()
    far.finish()
    await until(lambda: not proxy.open_connections)
    assert fault.counts.acts == 1


async def test_a_black_hole_takes_everything_and_gives_nothing(
    near: RawConnection, far: RawConnection, proxy: Proxy
) -> None:
    with proxy.black_hole() as fault:
        await near.send(bytes(8 * 2**20))
        near.finish()
        await until(lambda: fault.counts.nbytes == 8 * 2**20)
    assert proxy.counts.bytes_to_listener == 0
    with pytest.raises(ConnectionResetError):
        await far.receive(1)  # not a clean end of half a stream


async def test_a_connection_that_lost_nothing_survives_a_black_hole(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
    with proxy.black_hole():
        quiet, lossy = (near, far), await join()
        await lossy[0].send(b"lost")
        await until(lambda: proxy.faults[0].counts.nbytes == 4)
    assert await carry(*quiet, b"passes") == b"passes"
    with pytest.raises(ConnectionResetError):
        await lossy[1].receive(1)


async def test_a_bit_of_one_byte_is_flipped_once(
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy
) -> None:
    await carry(near, far, b"counts from the begin of the fault")
    with proxy.bit_flip(3, bit=1) as fault:
        assert await carry(near, far, bytes(3)) == bytes(3)
        assert await carry(near, far, bytes(4)) == b"\x02\0\0\0"
        assert await carry(far, near, bytes(8)) == bytes(8)
    assert (fault.counts.acts, fault.counts.nbytes) == (1, 15)


async def test_each_connection_can_have_its_flip(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    pairs = [await join() for _ in range(3)]
    with proxy.bit_flip(0, times=None, direction="to_listener") as fault:
        for pair in pairs:
            assert await carry(*pair, bytes(2)) == b"\x01\0"
    assert fault.counts.acts == fault.counts.connections == 3


async def test_a_seed_says_which_bits(join: Join, carry: Carry, proxy: Proxy) -> None:
    pair = await join()
    came = []
    for seed in (1, 1, 2):
        with proxy.bit_flip(seed=seed, every_bytes=100, times=None) as fault:
            came.append(await carry(*pair, bytes(10_000)))
        flipped = sum(byte.bit_count() for byte in came[-1])
        assert 50 < flipped == fault.counts.acts < 200
    assert came[0] == came[1] != came[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Latency(-1),
        lambda: Latency(math.nan),
        lambda: Rate(0),
        lambda: Rate(math.nan),
        lambda: Rate(math.inf),
        lambda: TinySlices(0),
        lambda: CutAfter(-1),
        lambda: BitFlip(),
        lambda: BitFlip(1, seed=1),
        lambda: BitFlip(-1),
        lambda: BitFlip(0, bit=8),
        lambda: Stall(direction="to_server"),  # type: ignore[arg-type]
        lambda: Stall(kind="lane"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Fault]) -> None:
    with pytest.raises(ValueError):
        make()


MAKERS: list[Callable[[Proxy], Fault]] = [
    lambda proxy: proxy.latency(0.1, direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.rate(100, direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.tiny_slices(direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.stall(direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.black_hole(direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.reset(direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.half_close("to_dialler", kind="lanes"),
    lambda proxy: proxy.cut_after(1, direction="to_dialler", kind="lanes"),
    lambda proxy: proxy.bit_flip(1, direction="to_dialler", kind="lanes"),
]


@pytest.mark.parametrize("make", MAKERS)
async def test_a_fault_is_made_off_and_put_on_the_proxy(
    proxy: Proxy, make: Callable[[Proxy], Fault]
) -> None:
    fault = make(proxy)
    assert proxy.faults == (fault,)
    assert not fault.is_on
    assert (fault.direction, fault.kind) == ("to_dialler", "lanes")
    with fault:
        assert fault.is_on
    assert not fault.is_on

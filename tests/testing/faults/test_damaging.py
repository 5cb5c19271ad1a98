from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asynckv.testing.blocked import until
from asynckv.testing.faults.damaging import BitFlip
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.faults.raw import RawConnection

Join = Callable[..., Awaitable[tuple[RawConnection, RawConnection]]]
Carry = Callable[[RawConnection, RawConnection, bytes], Awaitable[bytes]]


async def test_a_black_hole_takes_everything_and_gives_nothing(
    join: Join, proxy: Proxy
) -> None:
    near, far = await join()
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
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
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
    "options", [{}, {"at": 1, "seed": 1}, {"at": -1}, {"at": 0, "bit": 8}]
)
def test_a_flip_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        BitFlip(**options)

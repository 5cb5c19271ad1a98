from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from asynckv.testing.blocked import until
from asynckv.testing.faults.cutting import CutAfter
from asynckv.testing.faults.flows import MAX_LINE_BYTES
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.faults.raw import RawConnection

Join = Callable[..., Awaitable[tuple[RawConnection, RawConnection]]]
Carry = Callable[[RawConnection, RawConnection, bytes], Awaitable[bytes]]


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 200_000])
async def test_exactly_so_many_bytes_pass_before_a_cut(
    join: Join, carry: Carry, proxy: Proxy, nbytes: int
) -> None:
    near, far = await join()
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
    join: Join, proxy: Proxy
) -> None:
    near, far = await join()
    with (
        proxy.stall(direction="to_dialler"),
        proxy.cut_after(4, direction="to_listener"),
    ):
        await far.send(bytes(MAX_LINE_BYTES + 2**18))
        await until(lambda: proxy.counts.max_held_bytes >= MAX_LINE_BYTES)
        await near.send(b"12345")
        assert await far.receive(5) == b"1234"


async def test_a_cut_can_be_a_reset(join: Join, proxy: Proxy) -> None:
    near, far = await join()
    with proxy.cut_after(4, resets=True, direction="to_dialler"):
        await near.send(bytes(100))
        assert await far.receive(100) == bytes(100)
        await far.send(b"12345")
        with pytest.raises(ConnectionResetError):
            await near.receive(5)
        with pytest.raises(ConnectionResetError):
            await far.receive(1)


async def test_a_cut_counts_from_the_begin_of_the_fault(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
    assert await carry(near, far, bytes(100)) == bytes(100)
    with proxy.cut_after(10):
        assert await carry(near, far, bytes(100)) == bytes(10)


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


async def test_a_reset_of_the_lanes_leaves_the_control_connection(
    join: Join, carry: Carry, proxy: Proxy, control: bytes, lane: bytes
) -> None:
    of_control, of_lane = await join(control), await join(lane)
    with proxy.reset(kind="lanes"):
        with pytest.raises(ConnectionResetError):
            await of_lane[0].receive(1)
        assert await carry(*of_control, b"passes") == b"passes"


async def test_a_half_close_ends_one_direction(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
    with proxy.half_close("to_listener") as fault:
        assert await far.receive(1) == b""
        await near.send(bytes(2**20))  # read and dropped
        assert await carry(far, near, b"the other way") == b"the other way"
    assert await far.receive(1) == b""
    near.finish()
    far.finish()
    await until(lambda: not proxy.open_connections)
    assert fault.counts.acts == 1


def test_no_cut_after_less_than_nothing() -> None:
    with pytest.raises(ValueError):
        CutAfter(-1)

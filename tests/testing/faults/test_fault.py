from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from asynckv.testing.blocked import until_blocked
from asynckv.testing.faults.fault import Fault, FaultCounts
from asynckv.testing.faults.flows import Flow
from asynckv.testing.faults.proxy import Proxy
from asynckv.testing.faults.raw import RawConnection

Join = Callable[..., Awaitable[tuple[RawConnection, RawConnection]]]
Carry = Callable[[RawConnection, RawConnection, bytes], Awaitable[bytes]]


class Upper(Fault):
    """A fault of one's own: everything in capitals."""

    def change(self, flow: Flow, data: bytes) -> bytes:
        self.note(flow, acts=1, nbytes=len(data))
        return data.upper()


async def test_a_fault_of_ones_own_can_be_put_on_a_proxy(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
    upper = proxy.add(Upper())
    assert await carry(near, far, b"before") == b"before"
    with upper:
        assert upper.is_on
        assert await carry(near, far, b"while it is on") == b"WHILE IT IS ON"
    assert await carry(far, near, b"after") == b"after"
    assert upper.counts == FaultCounts(acts=1, nbytes=14, connections=1)
    assert proxy.faults == (upper,)


async def test_a_fault_concerns_one_direction(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
    with proxy.add(Upper(direction="to_dialler")):
        assert await carry(near, far, b"there") == b"there"
        assert await carry(far, near, b"back") == b"BACK"


async def test_a_fault_concerns_one_kind_of_connection(
    join: Join, carry: Carry, proxy: Proxy, control: bytes, lane: bytes
) -> None:
    stranger, of_control, of_lane = await join(), await join(control), await join(lane)
    with proxy.add(Upper(kind="lanes")):
        assert await carry(*stranger, b"a") == await carry(*of_control, b"a") == b"a"
        assert await carry(*of_lane, b"a") == b"A"
    with proxy.add(Upper(kind="control")):
        assert await carry(*stranger, b"a") == await carry(*of_lane, b"a") == b"a"
        assert await carry(*of_control, b"a") == b"A"
    with proxy.add(Upper()):
        assert await carry(*stranger, b"a") == b"A"


async def test_faults_are_applied_in_the_order_in_which_they_were_added(
    join: Join, carry: Carry, proxy: Proxy
) -> None:
    near, far = await join()
    with proxy.add(Upper()), proxy.bit_flip(0, bit=5):
        assert await carry(near, far, b"aa") == b"aA"


async def test_it_can_be_waited_for(join: Join, carry: Carry, proxy: Proxy) -> None:
    near, far = await join()
    with proxy.add(Upper()) as upper:
        acted = asyncio.create_task(upper.acted())
        await until_blocked(acted)
        assert not acted.done()
        await carry(near, far, b"a")
        await acted
    upper.begin()
    again = asyncio.create_task(upper.acted())
    await until_blocked(again)
    assert not again.done()
    again.cancel()


async def test_a_fault_is_for_one_proxy(proxy: Proxy) -> None:
    upper = Upper()
    for use in (upper.begin, lambda: upper.url):
        with pytest.raises(RuntimeError, match="on no proxy"):
            use()
    upper.end()
    assert proxy.add(upper).url == proxy.url
    with pytest.raises(RuntimeError, match="for one proxy"):
        proxy.add(upper)
    assert repr(upper) == "<Upper of both, both: off>"

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Attach, Frame, Hello, Ping, Welcome
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.faults.fault import (
    MAX_LINE_BYTES,
    Fault,
    FaultCounts,
    Flow,
    Greeting,
)
from asynckv.testing.faults.hostile import RawConnection
from asynckv.testing.faults.proxy import Proxy

ME = PeerIdentity("me", "1")
HELLO = Hello(1, 0, ME, Limits(), ("inline",), 2)
WELCOME = Welcome(1, 0, ME, Limits(), "inline", 2, b"token")


def encoded(frame: Frame) -> bytes:
    return encode_frame(0, frame)[0]


@pytest.mark.parametrize(
    ("frame", "kind"),
    [(HELLO, "control"), (WELCOME, "control"), (Attach(b"t", 0), "lanes")],
)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_greeting_tells_the_kind_once_it_is_whole(
    frame: Frame, kind: str, step: int
) -> None:
    greeting, data = Greeting(), encoded(frame) + b"and what follows"
    passed = [greeting.feed(data[i : i + step]) for i in range(0, len(data), step)]
    assert b"".join(passed) == data
    assert greeting.kind == kind


def test_nothing_of_a_greeting_passes_before_it_is_whole() -> None:
    greeting, data = Greeting(), encoded(HELLO)
    assert greeting.feed(data[:-1]) == b""
    assert greeting.kind == ""
    assert greeting.rest() == data[:-1]
    assert greeting.feed(b"anything") == b"anything"
    assert Greeting().feed(b"AKA") == b"AKA"  # it cannot become one


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
        encoded(Ping(1)),
        encode_frame(0, HELLO, b"body")[0],
        encoded(HELLO)[:-3] + b"???",
        b"\x16\x03\x01" + bytes(200),
        b"AKV2",
    ],
    ids=["http", "ping", "a body", "undecodable", "tls", "short"],
)
def test_what_is_no_greeting_passes_as_it_came(data: bytes) -> None:
    greeting = Greeting(heartbeat_ms=1)
    assert greeting.feed(data) + greeting.rest() == data
    assert greeting.kind == ""


@pytest.mark.parametrize("frame", [HELLO, WELCOME])
def test_the_heartbeat_is_quickened(frame: Hello | Welcome) -> None:
    data = Greeting(heartbeat_ms=50).feed(encoded(frame) + encoded(Ping(1)))
    (_, first, _), (_, second, _) = FrameDecoder().feed(data)
    assert isinstance(first, type(frame))
    assert first.limits == Limits(heartbeat_ms=50)
    assert first.identity == ME
    assert second == Ping(1)


def test_a_heartbeat_that_is_quick_stays() -> None:
    data = encoded(HELLO)
    assert Greeting(heartbeat_ms=5000).feed(data) == data


Join = Callable[..., Awaitable[tuple[RawConnection, RawConnection]]]
Carry = Callable[[RawConnection, RawConnection, bytes], Awaitable[bytes]]


class Upper(Fault):
    """A fault of one's own: everything in capitals."""

    def change(self, flow: Flow, data: bytes) -> bytes:
        self.note(flow, acts=1, nbytes=len(data))
        return data.upper()


async def test_a_fault_of_ones_own_can_be_put_on_a_proxy(
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy
) -> None:
    upper = proxy.add(Upper())
    assert await carry(near, far, b"before") == b"before"
    with upper:
        assert upper.is_on
        assert await carry(near, far, b"while it is on") == b"WHILE IT IS ON"
    assert await carry(far, near, b"after") == b"after"
    assert upper.counts == FaultCounts(acts=1, nbytes=14, connections=1)
    assert proxy.faults == (upper,)


async def test_a_fault_concerns_one_direction(
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy
) -> None:
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
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy
) -> None:
    with proxy.add(Upper()), proxy.bit_flip(0, bit=5):
        assert await carry(near, far, b"aa") == b"aA"


async def test_it_can_be_waited_for(
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy
) -> None:
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


async def test_who_does_not_read_makes_the_sender_wait(
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy
) -> None:
    data = os.urandom(2**20)
    sending = asyncio.create_task(near.send(64 * data))
    await until(lambda: proxy.counts.max_held_bytes >= MAX_LINE_BYTES)
    passed = proxy.counts.bytes_to_listener
    assert not sending.done()
    assert await carry(far, near, data) == data  # the other way is free
    assert await far.receive(64 * len(data)) == 64 * data
    await sending
    counts = proxy.counts
    assert (counts.bytes_to_listener, counts.bytes_to_dialler) == (2**26, 2**20)
    assert passed < 32 * 2**20
    assert proxy.counts.max_held_bytes < MAX_LINE_BYTES + 2**16


async def test_the_end_of_one_direction_leaves_the_other(
    near: RawConnection, far: RawConnection, carry: Carry, proxy: Proxy
) -> None:
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


async def test_who_has_gone_resets_who_still_sends(
    near: RawConnection, far: RawConnection, proxy: Proxy
) -> None:
    far.close()
    assert await near.receive(1) == b""
    with pytest.raises(OSError):
        while True:
            await near.send(bytes(2**16))
            await asyncio.sleep(0)
    await until(lambda: not proxy.open_connections)


async def test_a_line_of_single_bytes_is_bounded_too(
    near: RawConnection, far: RawConnection, proxy: Proxy
) -> None:
    with proxy.stall():
        (passage,) = proxy._passages
        line, sent = passage._flows[0]._line, 0
        while len(line) < 4096:
            sent += near.send_nowait(b"1")
            await asyncio.sleep(0)
        await near.send(bytes(2**16))
        assert len(line) == 4096
    assert await far.receive(sent + 2**16) == sent * b"1" + bytes(2**16)

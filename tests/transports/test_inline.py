"""Payload over lanes: what other transports do not have, and what is quiet when."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
import weakref
from collections.abc import Awaitable
from typing import Final

import pytest
from hypothesis import given, settings, strategies as st

from asynckv.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from asynckv.protocol.wire import digest_of, encode_chunk_header
from asynckv.tensors.feeds import Feed
from asynckv.testing.blocked import until
from asynckv.transports.inline import InlineTransport
from harness.inline_ends import (
    CHUNK_NBYTES,
    InlineEnd,
    Landing,
    open_beside_a_socket,
    open_inline_ends,
    tcp_pair,
)

pytestmark = pytest.mark.both_loops


_LARGE: Final = 24 * 2**20


def _lane_threads() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("asynckv-send", "asynckv-receive"))
    ]


def _pattern(nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.lists(st.integers(0, 3 * CHUNK_NBYTES), max_size=6), max_size=4),
    st.integers(1, 3),
)
def test_any_sizes_of_parts_land(transfers: list[list[int]], lanes: int) -> None:
    async def run() -> None:
        async with open_inline_ends(lanes, socket.socketpair) as (near, far):
            waits: list[Awaitable[bytes]] = []
            for transfer, sizes in enumerate(transfers):
                for part, size in enumerate(sizes):
                    target = bytearray(size)
                    targets.append((size, target))
                    waits.append(far.receive(transfer, part, target))
                    waits.append(near.send(transfer, part, _pattern(size)))
            for wait in waits:
                await wait

    targets: list[tuple[int, bytearray]] = []
    asyncio.run(run())
    assert all(target == _pattern(size) for size, target in targets)


async def test_a_transfer_does_not_wait_for_a_longer_one_before_it() -> None:
    async with open_inline_ends() as (near, far):
        target = bytearray(_LARGE)
        long, short = far.receive(1, 0, target), far.receive(2, 0, bytearray(10))
        near.send(1, 0, _pattern(_LARGE))
        near.send(2, 0, bytes(10))
        await short
        assert not long.future.done()
        await long


def _note(order: list[int], part: int, _: asyncio.Future[bytes]) -> None:
    order.append(part)


async def test_parts_of_a_transfer_land_in_order() -> None:
    async with open_inline_ends() as (near, far):
        order: list[int] = []
        landings = [far.receive(1, part, bytearray(2**20)) for part in range(8)]
        for part, landing in enumerate(landings):
            landing.future.add_done_callback(functools.partial(_note, order, part))
        for part in range(8):
            near.send(1, part, bytes(2**20))
        for landing in landings:
            await landing
        await until(lambda: len(order) == 8)
        assert order == list(range(8))


@pytest.mark.parametrize("digest", [True, False])
async def test_a_part_leaves_as_its_bytes_come(digest: bool) -> None:
    source, target = bytes(range(256)) * 1024, bytearray(256 * 1024)
    async with open_inline_ends(2, digest=digest) as (near, far):
        landed, sent, feed = far.receive(0, 0, target), Landing(), Feed(len(source))
        assert near.transport.feeds == 2
        near.transport.feed(0, 0, feed, sent)
        for start in range(0, len(source), 100_000):
            feed.put(memoryview(source)[start : start + 100_000])
            for _ in range(5):
                await asyncio.sleep(0)
        expected = digest_of(source) if digest else b""
        assert (await sent.future, await landed.future) == (expected, expected)
    assert target == source


async def test_an_idle_transport_has_no_threads() -> None:
    async with open_inline_ends(3) as (near, _):
        near.transport.announce(7)
        assert near.transport.describe() == b""
        assert _lane_threads() == []


async def test_it_opens_on_as_many_sockets_as_lanes() -> None:
    end = InlineEnd(2)
    with pytest.raises(LocalProtocolError, match="0 sockets for 2 lanes"):
        await end.transport.open(b"", [])
    with pytest.raises(LocalProtocolError, match="sockets"):
        await end.transport.open(b"", object())


async def test_nothing_moves_before_it_is_open() -> None:
    end = InlineEnd(1)
    with pytest.raises(LocalProtocolError, match="not open"):
        end.send(1, 0, b"x")
    with pytest.raises(LocalProtocolError, match="not open"):
        end.receive(2, 0, bytearray(1))


async def test_a_part_is_received_once() -> None:
    async with open_inline_ends() as (near, _):
        near.receive(1, 0, bytearray(3)).future.cancel()
        with pytest.raises(LocalProtocolError, match="twice"):
            near.transport.receive(1, 0, memoryview(bytearray(3)), Landing())
        near.transport.stop(1)


async def test_flipped_bits_change_the_digest() -> None:
    async with open_beside_a_socket() as (end, peer):
        landing = end.receive(1, 0, bytearray(4))
        peer.sendall(encode_chunk_header(1, 0, 0, 4) + b"abce")
        assert await landing != digest_of(b"abcd")


_LIES: Final = {
    "garbage": b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n" * 2,
    "never announced": encode_chunk_header(9, 0, 0, 4) + b"abcd",
    "no such part": encode_chunk_header(1, 7, 0, 4) + b"abcd",
    "wrong offset": encode_chunk_header(1, 0, 4, 4) + b"abcd",
    "too long": encode_chunk_header(1, 0, 0, 11) + b"abcd",
    "huge chunk": encode_chunk_header(1, 0, 0, 2**40),
    "overlap": encode_chunk_header(1, 0, 0, 4)
    + b"abcd"
    + encode_chunk_header(1, 0, 2, 4)
    + b"abcd",
}


@pytest.mark.parametrize("lie", _LIES.values(), ids=_LIES)
async def test_a_peer_that_lies_ends_the_transport(lie: bytes) -> None:
    async with open_beside_a_socket() as (end, peer):
        target = bytearray(10)
        landing = end.receive(1, 0, target)
        peer.sendall(lie)
        with pytest.raises(RemoteProtocolError):
            await landing
        assert isinstance(end.lost[0], RemoteProtocolError)
        assert len(end.lost) == 1
        assert target[4:] == bytes(6)


async def test_a_landed_part_cannot_be_sent_again() -> None:
    async with open_beside_a_socket() as (end, peer):
        first, second = end.receive(1, 0, bytearray(4)), end.receive(1, 1, bytearray(4))
        peer.sendall(2 * (encode_chunk_header(1, 0, 0, 4) + b"abcd"))
        with pytest.raises(RemoteProtocolError):
            await second
        await first


@pytest.mark.parametrize("sent", [0, 20, 56, 60])
async def test_a_peer_that_hangs_up_is_lost(sent: int) -> None:
    async with open_beside_a_socket() as (end, peer):
        landing = end.receive(1, 0, bytearray(100))
        peer.sendall((encode_chunk_header(1, 0, 0, 100) + bytes(100))[:sent])
        peer.close()
        with pytest.raises(PeerLost):
            await landing
        assert len(end.lost) == 1


async def test_a_peer_that_hangs_up_while_we_send_is_lost() -> None:
    async with open_beside_a_socket() as (end, peer):
        leaving = end.send(1, 0, bytes(_LARGE))
        await until(lambda: end.transport._lanes.is_touched(1))
        peer.close()
        with pytest.raises(PeerLost):
            await leaving
        with pytest.raises(PeerLost):
            await end.send(2, 0, b"later")
        with pytest.raises(PeerLost):
            await end.receive(3, 0, bytearray(4))


async def test_a_peer_that_hangs_up_when_nothing_is_missing_is_not_lost() -> None:
    async with open_beside_a_socket() as (end, peer):
        landing = end.receive(1, 0, bytearray(4))
        peer.sendall(encode_chunk_header(1, 0, 0, 4) + b"abcd")
        await landing
        peer.close()
        await until(lambda: bool(end.transport._lanes._lanes_left))
        assert end.lost == []
        with pytest.raises(PeerLost):
            await end.receive(3, 0, bytearray(4))


async def test_a_peer_that_closes_only_one_lane_is_lost_soon() -> None:
    async with open_inline_ends(2) as (near, far):
        landing = near.receive(1, 0, bytearray(4))
        far.transport._lanes._sockets[0].shut_down()
        with pytest.raises(PeerLost):
            await landing


async def test_closing_is_bounded_beside_a_stalled_peer() -> None:
    async with open_beside_a_socket() as (end, _):
        leaving = end.send(1, 0, bytes(_LARGE))
        async with asyncio.timeout(3):
            await end.transport.aclose()
        with pytest.raises(PeerLost, match="this side"):
            await leaving
        assert end.lost == []


async def test_done_is_called_after_on_lost() -> None:
    order: list[str] = []
    near, far = tcp_pair()
    transport = InlineTransport(
        1,
        True,
        asyncio.get_running_loop(),
        lambda _: order.append("lost"),
        CHUNK_NBYTES,
    )
    await transport.open(b"", [near])
    target = memoryview(bytearray(4))
    transport.receive(1, 0, target, lambda *_: order.append("done"))
    far.close()
    await until(lambda: len(order) == 2)
    assert order == ["lost", "done"]
    await transport.aclose()


async def test_aborted_before_it_was_opened_it_closes_its_sockets() -> None:
    near, far = tcp_pair()
    end = InlineEnd(1)
    end.transport.abort()
    await end.transport.open(b"", [near])
    with pytest.raises(PeerLost):
        await end.send(1, 0, b"x")
    assert near.fileno() == -1
    far.close()
    await end.transport.aclose()


async def test_a_failing_callback_hurts_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(digest: bytes, error: BaseException | None) -> None:
        raise RuntimeError("not my day")

    async with open_inline_ends() as (near, far):
        far.transport.receive(1, 0, memoryview(bytearray(2)), fail)
        landing = far.receive(1, 1, bytearray(2))
        near.send(1, 0, b"ab")
        near.send(1, 1, b"cd")
        await landing
    assert "completion callback failed" in caplog.text


def test_abort_and_the_end_of_the_loop_leave_nothing() -> None:
    async def run() -> None:
        pairs = [tcp_pair() for _ in range(2)]
        near, far = InlineEnd(2), InlineEnd(2)
        await near.transport.open(b"", [pair[0] for pair in pairs])
        await far.transport.open(b"", [pair[1] for pair in pairs])
        target = bytearray(_LARGE)
        far.receive(1, 0, target).future.cancel()
        near.send(1, 0, bytes(_LARGE)).future.cancel()
        near.transport.abort()
        far.transport.abort()

    asyncio.run(run())


@pytest.mark.parametrize("holds", ["source", "target"])
async def test_memory_that_a_stalled_peer_holds_is_quiet_within_a_second(
    holds: str,
) -> None:
    async with open_beside_a_socket(chunk_bytes=_LARGE) as (end, peer):
        if holds == "source":
            moving = end.send(1, 0, bytearray(_LARGE))
        else:
            moving = end.receive(1, 0, bytearray(CHUNK_NBYTES))
            peer.sendall(encode_chunk_header(1, 0, 0, CHUNK_NBYTES) + b"some")
        await until(lambda: end.transport._lanes.is_touched(1))
        async with asyncio.timeout(3):
            await end.transport.quiesce(1)
        assert not end.transport._lanes.is_touched(1)
        assert [type(error) for error in end.lost] == [PeerLost]
        assert not moving.future.done()


async def test_what_is_stopped_when_all_of_it_has_left_is_let_go() -> None:
    async with open_beside_a_socket() as (end, peer):
        memory, landing = memoryview(bytes(CHUNK_NBYTES)), Landing()
        kept = weakref.ref(memory)
        end.transport.send(1, 0, memory, landing)
        del memory
        while not end.transport._completions._parts:
            threading.Event().wait(0.001)  # the loop stands still: nobody is told yet
        end.transport.stop(1)
        await until(lambda: kept() is None)
        assert not landing.future.done()
        assert peer.fileno() >= 0


async def test_after_an_abort_a_plain_function_can_wait_until_a_source_is_quiet() -> (
    None
):
    async with open_inline_ends(2) as (near, far):
        sources = [bytearray(b"\1" * _LARGE) for _ in range(4)]
        targets = [bytearray(_LARGE) for _ in range(4)]
        for i, target in enumerate(targets):
            far.receive(1, i, target)
        for i, source in enumerate(sources):
            near.send(1, i, source)
        await until(lambda: bool(targets[1][0]))
        near.transport.abort()
        near.transport.block_until_quiet(1)
        assert not near.transport._lanes.is_touched(1)
        for source in sources:
            source[:] = b"\2" * _LARGE
        far.transport.abort()
        await far.transport.quiesce(1)
        assert not any(2 in target for target in targets)


async def test_closing_lets_queued_parts_leave() -> None:
    async with open_inline_ends(2) as (near, far):
        targets = [bytearray(_LARGE) for _ in range(3)]
        landings = [far.receive(1, i, target) for i, target in enumerate(targets)]
        leavings = [near.send(1, i, b"\1" * _LARGE) for i in range(3)]
        await near.transport.aclose()
        assert all(leaving.future.done() for leaving in leavings)
        for landing in landings:
            await landing
        assert far.lost == []

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from asynckv.links.sockets import in_thread, secure
from asynckv.links.streams import ControlStream, MemoryStream, SocketStream
from asynckv.security.tls import read_tls
from asynckv.security.tls_socket import TlsSocket
from asynckv.testing.blocked import until
from asynckv.testing.certificates import Authority

Pair = tuple[ControlStream, ControlStream]


def _sockets() -> Pair:
    loop = asyncio.get_running_loop()
    one, two = socket.socketpair()
    for sock in (one, two):
        sock.setblocking(False)
    return SocketStream(one, loop), SocketStream(two, loop)


def _memory() -> Pair:
    return MemoryStream.pair(asyncio.get_running_loop())


class Owner:
    """Keeps what a stream says."""

    def __init__(self, stream: ControlStream) -> None:
        self.data = bytearray()
        self.sizes: list[int] = []
        self.ends: list[OSError | None] = []
        self.writable = 0
        stream.start(self)

    def on_bytes(self, data: bytes) -> None:
        self.data += data
        self.sizes.append(len(data))

    def on_writable(self) -> None:
        self.writable += 1

    def on_end(self, error: OSError | None) -> None:
        self.ends.append(error)


@pytest.mark.both_loops
class Ends(NamedTuple):
    """Both ends of a stream, and what each has said."""

    near: ControlStream
    far: ControlStream
    one: Owner
    two: Owner


@pytest.fixture(params=[_sockets, _memory], ids=["socket", "memory"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    near, far = request.param()
    yield Ends(near, far, Owner(near), Owner(far))
    near.abort()
    far.abort()


async def test_bytes_come_out_as_they_went_in(ends: Ends) -> None:
    near, _, _, owner = ends
    near.write(b"one")
    near.write(b"two")
    await until(lambda: len(owner.data) == 6)
    assert owner.data == b"onetwo"
    assert near.sent_bytes == 6


@pytest.mark.both_loops
async def test_who_says_much_is_heard_more_at_a_time() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        owner = Owner(SocketStream(far, asyncio.get_running_loop()))
        expected: list[int] = []
        for nbytes in (2**18, 1, 2**18):
            sent = near.send(bytes(nbytes))
            expected.extend([2**16, sent - 2**16] if sent > 2**16 else [sent])
            await until(lambda: sum(owner.sizes) == sum(expected))
        assert owner.sizes == expected
        asyncio.get_running_loop().remove_reader(far)


@pytest.mark.both_loops
async def test_what_does_not_leave_at_once_leaves_later(
    ends: Ends,
) -> None:
    near, _, sender, receiver = ends
    near.write(bytes(8 * 2**20))
    assert near.unsent_bytes > 0
    await until(lambda: len(receiver.data) == 8 * 2**20)
    await until(lambda: sender.writable > 0)
    assert near.unsent_bytes == 0


@pytest.mark.both_loops
async def test_nothing_is_read_while_it_is_paused(ends: Ends) -> None:
    near, far, _, owner = ends
    far.pause_reading()
    near.write(b"later")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not owner.data
    far.resume_reading()
    await until(lambda: owner.data == b"later")


@pytest.mark.both_loops
async def test_a_finished_half_still_reads(ends: Ends) -> None:
    near, far, one, two = ends
    near.write(b"last words")
    near.finish()
    near.finish()
    await until(lambda: two.ends == [None])
    far.write(b"heard")
    await until(lambda: one.data == b"heard")
    assert two.data == b"last words"


@pytest.mark.both_loops
async def test_finishing_waits_for_what_was_written(ends: Ends) -> None:
    near, _, _, owner = ends
    near.write(bytes(4 * 2**20))
    near.finish()
    await until(lambda: owner.ends == [None])
    assert len(owner.data) == 4 * 2**20


@pytest.mark.both_loops
async def test_the_end_is_told_once(ends: Ends) -> None:
    _, far, owner, _ = ends
    far.abort()
    await until(lambda: bool(owner.ends))
    for _ in range(10):
        await asyncio.sleep(0)
    assert owner.ends == [None]


@pytest.mark.both_loops
async def test_an_aborted_stream_calls_nobody_and_ends_the_other(
    ends: Ends,
) -> None:
    near, far, one, two = ends
    far.write(b"unread")
    near.abort()
    near.abort()
    near.write(b"ignored")
    near.finish()
    near.resume_reading()
    await until(lambda: len(two.ends) == 1)
    assert not one.data and not one.ends


@pytest.mark.both_loops
async def test_a_broken_socket_is_told_on_a_later_tick() -> None:
    near, far = _sockets()
    owner = Owner(near)
    near.pause_reading()
    far.abort()
    near.write(b"nobody there")
    assert not owner.ends
    await until(lambda: len(owner.ends) == 1)
    assert isinstance(owner.ends[0], BrokenPipeError)
    near.abort()


@contextlib.asynccontextmanager
async def greeted(authority: Authority) -> AsyncIterator[SocketStream]:
    """What follows a greeting over TLS, of which more came than was read."""
    keys = await in_thread(lambda: read_tls(authority.issue()))
    one, two = socket.socketpair()
    near = TlsSocket.over(one, keys, dials="localhost")
    with near, TlsSocket.over(two, keys) as far:
        await asyncio.gather(secure(near, keys), secure(far, keys))
        far.send(b"greeting, and more")
        assert near.recv(8) == b"greeting"
        yield SocketStream(near, asyncio.get_running_loop())


@pytest.mark.both_loops
async def test_what_came_with_the_end_of_the_greeting_is_read(
    authority: Authority,
) -> None:
    async with greeted(authority) as stream:
        owner = Owner(stream)
        await until(lambda: owner.data == b", and more")
        stream.abort()


@pytest.mark.both_loops
async def test_a_stream_that_is_aborted_at_once_hears_nothing(
    authority: Authority,
) -> None:
    async with greeted(authority) as stream:
        owner = Owner(stream)
        stream.abort()
        await asyncio.sleep(0)
        assert not owner.data
        assert not owner.ends


class Reader:
    """Pauses after each piece."""

    def __init__(self, stream: MemoryStream) -> None:
        self.pieces: list[bytes] = []
        self._stream = stream
        stream.start(self)

    def on_bytes(self, data: bytes) -> None:
        self.pieces.append(bytes(data))
        self._stream.pause_reading()

    def on_writable(self) -> None: ...

    def on_end(self, error: OSError | None) -> None: ...


async def test_a_reader_that_pauses_within_a_call_gets_no_more() -> None:
    near, far = MemoryStream.pair(asyncio.get_running_loop())
    reader = Reader(far)
    near.write(b"one")
    near.write(b"two")
    for _ in range(5):
        await asyncio.sleep(0)
    assert reader.pieces == [b"one"]
    assert near.unsent_bytes == 3
    far.resume_reading()
    for _ in range(5):
        await asyncio.sleep(0)
    assert reader.pieces == [b"one", b"two"]


async def test_nothing_is_delivered_within_the_call_that_writes() -> None:
    near, far = MemoryStream.pair(asyncio.get_running_loop())
    reader = Reader(far)
    near.write(b"one")
    assert reader.pieces == []
    near.abort()
    far.abort()

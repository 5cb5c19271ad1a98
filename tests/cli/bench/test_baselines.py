from __future__ import annotations

import asyncio
import contextlib
import socket
from asyncio import to_thread
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asynckv.cli.bench import baselines
from asynckv.cli.bench.baselines import (
    MAX_NBYTES,
    MAX_PARTS,
    Baselines,
    BaselineServer,
    EchoConnection,
    Kind,
    Meeting,
    What,
    connect_to,
    meeting_as_tensor,
    meeting_from,
    open_baselines,
    pack_order,
    read_order,
    receive_into,
)
from asynckv.protocol.handshake import MAX_LANES
from asynckv.testing import until_blocked

HOST = "127.0.0.1"


@pytest.fixture
async def server() -> AsyncIterator[BaselineServer]:
    server = BaselineServer(HOST)
    async with server:
        yield server


@pytest.fixture
async def beside(server: BaselineServer) -> AsyncIterator[Baselines]:
    with ThreadPoolExecutor(1) as thread:
        async with open_baselines(HOST, server.meeting, 3, thread) as found:
            yield found


async def dial(server: BaselineServer, said: bytes) -> socket.socket:
    """Connect, and say what no baseline may say first."""
    address = (HOST, server.meeting.port)
    peer = await to_thread(socket.create_connection, address, 10)
    peer.sendall(said)
    return peer


@pytest.mark.both_loops
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("parts", [3, 7])
async def test_the_streams_share_out_all_parts(
    beside: Baselines, count: int, parts: int
) -> None:
    targets = [memoryview(bytearray(70_000)) for _ in range(parts)]
    assert len(beside.raw) == 3
    assert await to_thread(beside.raw.pull, targets, count) > 0
    assert all(set(target) == {1} for target in targets)


async def test_a_push_returns_when_the_peer_has_it_all(beside: Baselines) -> None:
    assert await to_thread(beside.raw.push, [memoryview(bytes(100_000))] * 3) > 0
    assert await to_thread(beside.raw.pull, [memoryview(bytearray(10))]) > 0


async def test_the_peer_says_how_much_cpu_it_used(beside: Baselines) -> None:
    raw = beside.raw
    assert 0 < await to_thread(raw.cpu_s) <= await to_thread(raw.cpu_s)


def test_a_peer_that_hangs_up_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"12")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            receive_into(ours, memoryview(bytearray(3)))


TOO_MUCH = pack_order(What.PULL, 1, MAX_NBYTES + 1)
STREAMS_TOO_MUCH = pack_order(What.PULL, 1, 2**20 + 1)


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Kind.RAW, TOO_MUCH),
        (Kind.STREAMS, STREAMS_TOO_MUCH),
        (Kind.STREAMS, pack_order(What.PUSH, 1, 1)),
        (Kind.ECHO, b"\0\0\0\1?"),
        (Kind.ECHO, b"\0\2\0\0"),
    ],
)
async def test_who_says_what_no_bench_says_is_hung_up_on(
    server: BaselineServer, kind: Kind, said: bytes
) -> None:
    peer = await to_thread(connect_to, HOST, server.meeting, kind)
    with peer:
        peer.sendall(said)
        assert await to_thread(peer.recv, 1) == b""


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", [*Kind, 9])
async def test_who_brings_another_token_is_hung_up_on(
    server: BaselineServer, kind: int
) -> None:
    token = server.meeting.token if kind == 9 else bytes(32)
    with await dial(server, bytes([kind]) + token) as peer:
        assert await to_thread(peer.recv, 1) == b""


@pytest.mark.both_loops
@pytest.mark.parametrize("said", [b"", b"half a token"])
async def test_who_brings_no_token_is_hung_up_on(
    server: BaselineServer, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(baselines, "_TOKEN_TIMEOUT_S", 0.05)
    with await dial(server, said) as peer:
        assert await to_thread(peer.recv, 1) == b""


async def test_there_are_only_so_many_connections(server: BaselineServer) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(MAX_LANES + 2):
            peer = await to_thread(connect_to, HOST, server.meeting, Kind.STREAMS)
            held.enter_context(peer)
            peer.sendall(pack_order(What.PULL, 1, 1))
            assert await to_thread(peer.recv, 1) == b"\0"
        with await dial(server, b"") as one_more:
            assert await to_thread(one_more.recv, 1) == b""


@pytest.mark.both_loops
async def test_closing_hangs_up_on_everybody() -> None:
    server = BaselineServer(HOST)
    async with contextlib.AsyncExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1))
        async with server:
            opening = open_baselines(HOST, server.meeting, 3, thread)
            found = await stack.enter_async_context(opening)
            assert await found.echo.ping(b"") == b""
        for count in (1, 3):
            targets = [memoryview(bytearray(10)) for _ in range(3)]
            with pytest.raises(OSError):
                await to_thread(found.raw.pull, targets, count)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await found.streams.exchange(1, 1, 10)
        with pytest.raises(ConnectionError):
            await found.echo.ping(b"")


async def test_nobody_there_is_an_error() -> None:
    server = BaselineServer(HOST)
    async with server:
        pass
    with pytest.raises(OSError), ThreadPoolExecutor(1) as thread:
        async with open_baselines(HOST, server.meeting, 2, thread):
            raise AssertionError


@pytest.mark.both_loops
@pytest.mark.parametrize("outstanding", [1, 3, 10])
async def test_every_request_is_answered_and_timed(
    beside: Baselines, outstanding: int
) -> None:
    for nbytes in (1000, 10):
        assert len(await beside.streams.exchange(5, outstanding, nbytes)) == 5


def test_a_meeting_survives_its_way_through_a_store() -> None:
    meeting = Meeting(65535, bytes(32))
    assert meeting_from(meeting_as_tensor(meeting)) == meeting


@pytest.mark.parametrize(
    "meeting", [Meeting(0, bytes(32)), Meeting(65536, bytes(32)), Meeting(1, b"")]
)
def test_what_cannot_be_a_meeting_is_refused(meeting: Meeting) -> None:
    with pytest.raises(ValueError, match="no meeting"):
        meeting_from(meeting_as_tensor(meeting))


def test_other_bytes_are_no_meeting() -> None:
    with pytest.raises(ValueError):
        meeting_from(torch.zeros(3, dtype=torch.uint8))


def test_an_order_is_read_as_it_was_written() -> None:
    assert read_order(pack_order(What.PUSH, 3, 64)) == (What.PUSH, 3, 64)


@pytest.mark.parametrize(
    "packed",
    [b"\x09" + bytes(15), pack_order(What.PULL, MAX_PARTS + 1, 1), TOO_MUCH],
)
def test_an_order_beyond_the_bounds_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError):
        read_order(packed)


@pytest.mark.both_loops
@pytest.mark.parametrize("nbytes", [0, 64, 40_000])
async def test_what_was_sent_comes_back(beside: Baselines, nbytes: int) -> None:
    for seed in range(3):
        body = bytes([seed]) * nbytes
        assert await beside.echo.ping(body) == body


@pytest.mark.both_loops
async def test_an_echo_that_is_hung_up_on_ends_who_waits() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        connection = await EchoConnection.open(ours)
        waiting = asyncio.create_task(connection.ping(b"never answered"))
        await until_blocked(waiting)
        theirs.close()
        with pytest.raises(ConnectionError):
            await waiting
        connection.close()

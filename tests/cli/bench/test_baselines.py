from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from asynckv.cli.bench import echo
from asynckv.cli.bench.baselines import (
    MAX_NBYTES,
    MAX_PARTS,
    ORDER,
    Meeting,
    RawConnection,
    RawServer,
    RawStreams,
    StreamsConnection,
    StreamsServer,
    What,
    meeting_as_tensor,
    meeting_from,
    read_order,
    receive_into,
)
from asynckv.cli.bench.echo import EchoConnection, EchoServer, in_turns
from asynckv.protocol.handshake import MAX_LANES
from asynckv.testing import until_blocked

TOKEN = bytes(range(32))


@pytest.fixture
def server() -> Iterator[RawServer]:
    server = RawServer("127.0.0.1", TOKEN)
    yield server
    server.close()


@pytest.fixture
def raw(server: RawServer) -> Iterator[RawConnection]:
    connection = RawConnection("127.0.0.1", server.port, TOKEN)
    yield connection
    connection.close()


def test_a_pull_fills_every_target(raw: RawConnection) -> None:
    targets = [memoryview(bytearray(100_000)) for _ in range(3)]
    assert raw.pull(targets) > 0
    assert all(set(target) == {1} for target in targets)


def test_a_push_returns_when_the_peer_has_it_all(raw: RawConnection) -> None:
    assert raw.push([memoryview(bytes(100_000))] * 3) > 0
    assert len(raw.ping(2)) == 2


def test_every_ping_is_timed(raw: RawConnection) -> None:
    assert [seconds > 0 for seconds in raw.ping(3)] == [True] * 3


def test_the_peer_says_how_much_cpu_it_used(raw: RawConnection) -> None:
    assert 0 < raw.cpu_s() <= raw.cpu_s()


def test_a_peer_that_hangs_up_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"12")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            receive_into(ours, memoryview(bytearray(3)))


def dial(server: RawServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 10)


@pytest.mark.parametrize(
    "said",
    [bytes(32), TOKEN + ORDER.pack(What.PULL, 1, MAX_NBYTES + 1)],
    ids=["another token", "too much"],
)
def test_who_has_no_token_or_asks_for_too_much_is_hung_up_on(
    server: RawServer, said: bytes
) -> None:
    with dial(server) as peer:
        peer.sendall(said)
        assert peer.recv(1) == b""


def test_closing_hangs_up_on_everybody(server: RawServer, raw: RawConnection) -> None:
    raw.ping(1)
    server.close()
    with pytest.raises(OSError):
        raw.ping(1)


def test_each_connection_sends_from_another_place_of_what_it_was_given() -> None:
    sources = [memoryview(bytes([number]) * 100) for number in range(8)]
    server = RawServer("127.0.0.1", TOKEN, sources)
    place, found = bytearray(100), []
    try:
        for _ in range(5):
            connection = RawConnection("127.0.0.1", server.port, TOKEN)
            connection.pull([memoryview(place)])
            found.append(place[0])
            connection.push([memoryview(place)])  # into memory of its own
            connection.close()
    finally:
        server.close()
    assert found == [2, 4, 6, 0, 2]
    assert [source[0] for source in sources] == list(range(8))


def test_there_are_only_so_many_connections(server: RawServer) -> None:
    held = [RawConnection("127.0.0.1", server.port, TOKEN) for _ in range(MAX_LANES)]
    for connection in held:
        connection.ping(1)
    with dial(server) as one_more:
        assert one_more.recv(1) == b""
    for connection in held:
        connection.close()


@pytest.fixture
def streams(server: RawServer) -> Iterator[RawStreams]:
    streams = RawStreams("127.0.0.1", server.port, TOKEN, 3)
    yield streams
    streams.close()
    for thread in threading.enumerate():
        if thread.name.startswith("raw stream"):
            thread.join()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("parts", [3, 7])
def test_the_streams_share_out_all_parts(
    streams: RawStreams, count: int, parts: int
) -> None:
    targets = [memoryview(bytearray(70_000)) for _ in range(parts)]
    assert len(streams) == 3
    assert streams.pull(targets, count) > 0
    assert all(set(target) == {1} for target in targets)


def test_a_stream_that_is_hung_up_on_is_an_error(
    server: RawServer, streams: RawStreams
) -> None:
    streams.first.ping(1)
    server.close()
    with pytest.raises(OSError):
        streams.pull([memoryview(bytearray(10)) for _ in range(3)], 3)


def test_nobody_there_is_an_error(server: RawServer) -> None:
    server.close()
    with pytest.raises(OSError):
        RawStreams("127.0.0.1", server.port, TOKEN, 2).first.ping(1)


@contextlib.asynccontextmanager
async def streaming(token: bytes = TOKEN) -> AsyncIterator[StreamsConnection]:
    async with StreamsServer("127.0.0.1", TOKEN) as port:
        connection = await StreamsConnection.open("127.0.0.1", port, token)
        yield connection
        connection.close()


@pytest.mark.parametrize("outstanding", [1, 3, 10])
async def test_every_request_is_answered_and_timed(outstanding: int) -> None:
    async with streaming() as connection:
        assert len(await connection.exchange(5, outstanding, 1000)) == 5


@pytest.mark.parametrize(
    ("token", "nbytes"),
    [(bytes(32), 10), (TOKEN, 2**20 + 1)],
    ids=["token", "too much"],
)
async def test_streams_hang_up_on_a_stranger_and_on_who_asks_for_too_much(
    token: bytes, nbytes: int
) -> None:
    async with streaming(token) as connection:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await connection.exchange(1, 1, nbytes)


def test_a_meeting_survives_its_way_through_a_store() -> None:
    meeting = Meeting(1, 65535, 2, bytes(32))
    assert meeting_from(meeting_as_tensor(meeting)) == meeting


@pytest.mark.parametrize(
    "meeting",
    [
        Meeting(0, 1, 1, bytes(32)),
        Meeting(1, 65536, 1, bytes(32)),
        Meeting(1, 1, 0, bytes(32)),
        Meeting(1, 1, 1, b""),
    ],
)
def test_what_cannot_be_a_meeting_is_refused(meeting: Meeting) -> None:
    with pytest.raises(ValueError, match="no meeting"):
        meeting_from(meeting_as_tensor(meeting))


def test_other_bytes_are_no_meeting() -> None:
    with pytest.raises(ValueError):
        meeting_from(torch.zeros(3, dtype=torch.uint8))


def test_an_order_is_read_as_it_was_written() -> None:
    assert read_order(ORDER.pack(What.PUSH, 3, 64)) == (What.PUSH, 3, 64)


@pytest.mark.parametrize(
    ("what", "parts", "nbytes"),
    [(9, 1, 1), (1, MAX_PARTS + 1, 1), (1, 1, MAX_NBYTES + 1)],
)
def test_an_order_beyond_the_bounds_is_refused(
    what: int, parts: int, nbytes: int
) -> None:
    with pytest.raises(ValueError):
        read_order(ORDER.pack(what, parts, nbytes))


@contextlib.asynccontextmanager
async def connected(token: bytes = TOKEN) -> AsyncIterator[EchoConnection]:
    async with EchoServer("127.0.0.1", TOKEN) as port:
        connection = await EchoConnection.open("127.0.0.1", port, token)
        try:
            yield connection
        finally:
            connection.close()


@pytest.mark.both_loops
@pytest.mark.parametrize("nbytes", [0, 64, 40_000])
async def test_what_was_sent_comes_back(nbytes: int) -> None:
    async with connected() as connection:
        for seed in range(3):
            body = bytes([seed]) * nbytes
            assert await connection.ping(body) == body


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("token", "nbytes"), [(bytes(32), 0), (TOKEN, 2**17)], ids=["token", "too much"]
)
async def test_an_echo_hangs_up_on_a_stranger_and_on_who_sends_too_much(
    token: bytes, nbytes: int
) -> None:
    async with connected(token) as connection:
        with pytest.raises(ConnectionError):
            await connection.ping(bytes(nbytes))


@pytest.mark.both_loops
async def test_who_says_what_no_bench_says_is_hung_up_on() -> None:
    async with connected() as connection:
        connection.send(b"no message")
        with pytest.raises(ConnectionError):
            await connection.ping(b"")


@pytest.mark.both_loops
async def test_a_token_of_another_length_is_no_token() -> None:
    with pytest.raises(ValueError, match="3 bytes"):
        await EchoConnection.open("127.0.0.1", 1, b"abc")


@pytest.mark.both_loops
async def test_who_brings_no_token_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(echo, "_TOKEN_TIMEOUT_S", 0.05)
    async with EchoServer("127.0.0.1", TOKEN) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.both_loops
async def test_a_server_that_closes_ends_who_waits() -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = EchoServer("127.0.0.1", TOKEN)
        port = await stack.enter_async_context(server)
        connection = await EchoConnection.open("127.0.0.1", port, TOKEN)
        await connection.ping(b"")
        for each in server.connections:
            each.received = lambda message: None  # type: ignore[method-assign]
        waiting = asyncio.create_task(connection.ping(b""))
        await until_blocked(waiting)
        await stack.aclose()
        with pytest.raises(ConnectionError):
            await waiting


@pytest.mark.both_loops
async def test_calls_take_turns_and_the_baseline_is_first_and_last() -> None:
    order: list[str] = []

    async def ours() -> None:
        order.append("o")

    async def bare() -> None:
        order.append("b")

    turns = await in_turns(25, ours, bare)
    assert "".join(order) == "b" * 10 + ("o" * 10 + "b" * 10) * 2 + "o" * 5 + "b" * 10
    assert [len(one) for one in (turns.ours, turns.before, turns.after)] == [25, 20, 20]

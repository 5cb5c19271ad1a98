from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import torch

import asynckv
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Contains,
    Failure,
    Frame,
    Get,
    Hello,
    Insert,
    Offer,
    Peek,
    Ping,
    Put,
    Reached,
    Select,
    Took,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.values import PeerIdentity
from asynckv.protocol.wire import TYPE_CONTROL, encode_chunk_header, pack_header
from asynckv.testing.blocked import until
from asynckv.testing.faults.hostile import (
    QUICK,
    HostilePeer,
    RawConnection,
    RawListener,
    accept_hostile_peer,
    claim,
    open_hostile_peer,
    spec_of,
)
from asynckv.testing.pairs import KVPair, open_kv_pair


async def test_bytes_pass_and_the_end_is_an_end() -> None:
    with RawListener() as listener, await RawConnection.dial(listener.url) as near:
        far = await listener.accept()
        await near.send(b"12345")
        assert await far.receive(2) == b"12"
        assert await far.receive_some() == b"345"
        near.finish()
        assert await far.receive(1) == b""


async def test_a_full_connection_takes_nothing_more_at_once() -> None:
    with RawListener() as listener, await RawConnection.dial(listener.url) as near:
        while near.send_nowait(bytes(2**20)):
            pass


async def test_nobody_there_is_an_error_of_the_system() -> None:
    with RawListener() as listener:
        url = listener.url
    with pytest.raises(ConnectionRefusedError):
        await RawConnection.dial(url)


MIB = 2**20


@pytest.fixture
async def pair() -> AsyncIterator[KVPair]:
    """Buffers of 4 MiB, and an honest peer; whatever happens, it goes on."""
    async with asyncio.timeout(30), open_kv_pair("tcp", max_bytes="4MiB") as pair:
        yield pair
        await honest_work(pair)
        assert pair.peer.is_connected


@pytest.fixture
async def hostile(pair: KVPair) -> AsyncIterator[HostilePeer]:
    async with open_hostile_peer(pair.server.url) as hostile:
        yield hostile


async def honest_work(pair: KVPair) -> None:
    """An entry there and back, in line and by payload."""
    for numel in (10, 100_000):
        tensor = torch.arange(numel)
        await pair.peer.lookup.insert([1, 1], None, tensor, None, None)
        entry = await pair.peer.lookup.drop_select([1, 1])
        assert isinstance(entry.key, torch.Tensor)
        assert torch.equal(entry.key, tensor)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def granted(hostile: HostilePeer, nbytes: int = 200_000) -> None:
    """Begin an insert by payload, as stream 1 and transfer 1."""
    await hostile.send(1, Insert("entry", 1, False), claim(nbytes))
    await hostile.expect(Grant)


CLAIMS: list[tuple[Frame, bytes]] = [
    (Insert("x", 1, False), claim(2**60)),
    (Insert("x", 1, True), claim(2**60)),
    (Insert("x", 1, False), claim(2**62, 2**62)),
    (Insert("x", 1, False), claim(2**40)),
    (Insert("x", 1, False, streaming=True), claim(2**40)),
    (Put("x", 1, False, spec_of(2**60)), b""),
    (Put("x", 1, False, spec_of(2**40)), b""),
    (Put("x", 1, True, spec_of(2**40)), b"short"),
]


@pytest.mark.parametrize(("frame", "body"), CLAIMS, ids=range(len(CLAIMS)))
async def test_a_claim_of_any_size_is_refused_before_memory_is_made(
    pair: KVPair, hostile: HostilePeer, frame: Frame, body: bytes
) -> None:
    before = resident_bytes()
    await hostile.send(1, frame, body)
    try:
        _, answer, _ = await hostile.receive()
    except ConnectionRefusedError:
        pass
    else:
        assert isinstance(answer, Failure)
    assert resident_bytes() - before < 32 * MIB
    assert pair.lookup.statistics().used_bytes == 0


async def test_a_frame_that_claims_any_length_ends_its_link(
    pair: KVPair, hostile: HostilePeer
) -> None:
    await hostile.control.send(pack_header(TYPE_CONTROL, 20, 2**60, 1) + bytes(1000))
    assert "bytes of body" in await hostile.end()


@pytest.mark.parametrize(
    "chunk",
    [
        encode_chunk_header(1, 0, 0, 2**60),
        encode_chunk_header(1, 0, 0, 200_001),
        encode_chunk_header(1, 0, 2**63, 10),
        encode_chunk_header(1, 1, 0, 10),
        encode_chunk_header(99, 0, 0, 10),
        b"no header of a chunk" * 10,
    ],
    ids=["2**60", "too long", "far off", "no such part", "unannounced", "garbage"],
)
async def test_a_chunk_that_lies_ends_its_link(
    pair: KVPair, hostile: HostilePeer, chunk: bytes
) -> None:
    await granted(hostile)
    await hostile.lanes[0].send(chunk + bytes(100))
    await hostile.end()
    await until(lambda: pair.lookup.statistics().used_bytes == 0)


NONSENSE: list[list[tuple[int, Frame]]] = [
    [(1, Select(False)), (1, Select(False))],
    [(1, Peek(False)), (1, Peek(False))],
    [(2, Select(False))],
    [(5, Took(b"1" * 16))],
    [(1, Grant(1))],
    [(0, Select(False))],
    [(1, Ping(1))],
    [(0, Hello(1, 0, PeerIdentity("x", "1"), QUICK, ("inline",), 1))],
    [(1, Accepted())],
    [(1, Select(False)), (1, Accepted())],
    [(1, Select(False)), (1, Sent(1, 0))],
    [(2**31 + 1, Select(False))],
]


@pytest.mark.parametrize("frames", NONSENSE)
async def test_a_frame_that_makes_no_sense_ends_its_link(
    pair: KVPair, hostile: HostilePeer, frames: list[tuple[int, Frame]]
) -> None:
    for stream, frame in frames:
        await hostile.send(stream, frame)
    assert "ProtocolError" in await hostile.end()


async def test_a_transfer_that_is_numbered_like_another_is_refused(
    pair: KVPair, hostile: HostilePeer
) -> None:
    await granted(hostile)
    await hostile.send(3, Insert("other", 1, False), claim(200_000))
    _, answer, _ = await hostile.receive()
    assert isinstance(answer, Failure)


@pytest.mark.parametrize("questions", [5_000, 0])
async def test_who_never_reads_cannot_make_the_server_hold_its_answers(
    pair: KVPair, hostile: HostilePeer, questions: int
) -> None:
    await pair.store.put("large", torch.zeros(15_000, dtype=torch.int32))
    before, asked = resident_bytes(), range(1, 2 * questions, 2)
    gets = b"".join(encode_frame(number, Get("large"))[0] for number in asked)
    flood = b"".join(encode_frame(0, Ping(number))[0] for number in range(1000))
    with pytest.raises(OSError):  # 300 MB of answers, or pongs for ever
        await hostile.control.send(gets)
        while True:
            await hostile.control.send(flood)
    assert resident_bytes() - before < 64 * MIB


async def test_a_frame_that_trickles_in_delays_nobody(
    pair: KVPair, hostile: HostilePeer
) -> None:
    frame = encode_frame(1, Contains(("x",) * 50))[0]
    for byte in frame[:-1]:
        await hostile.control.send(bytes([byte]))
        await honest_work(pair) if byte % 16 == 0 else await asyncio.sleep(0)
    await hostile.control.send(frame[-1:])
    stream, _, _ = await hostile.receive()
    assert stream == 1


@pytest.fixture
async def offer(pair: KVPair, hostile: HostilePeer) -> Offer:
    """What a hostile consumer was offered: the only entry."""
    await pair.lookup.insert([1], None, torch.ones(3), None, None, entry_id="entry")
    await hostile.send(1, Select(False))
    return await hostile.expect(Offer)


@pytest.mark.usefixtures("offer")
async def test_an_entry_whose_consumer_falls_silent_goes_to_the_next(
    pair: KVPair,
) -> None:
    entry = await pair.peer.lookup.drop_select([1])  # after three heartbeats
    assert (entry.entry_id, entry.attempt) == ("entry", 2)


async def test_the_token_of_a_delivery_is_worth_nothing_on_another_link(
    pair: KVPair, offer: Offer
) -> None:
    async with open_hostile_peer(pair.server.url) as thief:
        await thief.send(1, Select(False))
        await thief.send(1, Ack(offer.token))
        failure = await thief.expect(Failure)
    assert failure.code == "LeaseLost"
    assert pair.lookup.statistics().acknowledged == 0
    assert (await pair.peer.lookup.drop_select([1])).attempt == 2


@pytest.mark.usefixtures("offer")
async def test_an_acknowledgement_with_another_token_is_refused(
    pair: KVPair, hostile: HostilePeer
) -> None:
    await hostile.send(1, Ack(b"another token 16"))
    failure = await hostile.expect(Failure)
    assert failure.code == "LeaseLost"
    assert (await pair.peer.lookup.drop_select([1])).attempt == 2


async def test_a_late_acknowledgement_is_refused() -> None:
    async with (
        asyncio.timeout(30),
        asynckv.LookupBuffer("4MiB", drain_s=0, max_hold_s=0.2) as lookup,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup) as server,
        open_hostile_peer(server.url) as hostile,
    ):
        await lookup.insert([1], None, torch.ones(3), None, None)
        await hostile.send(1, Select(False))
        offer = await hostile.expect(Offer)
        await hostile.send(1, Reached(offer.token))
        async with hostile.alive():
            assert (await lookup.drop_select([1])).attempt == 2
        await hostile.send(1, Ack(offer.token))
        failure = await hostile.expect(Failure)
        assert failure.code == "LeaseLost"
        assert lookup.statistics().acknowledged == 1


async def test_strangers_who_say_nothing_do_not_keep_others_out(pair: KVPair) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(await RawConnection.dial(pair.server.url))
        async with asynckv.connect(pair.server.url) as peer:
            assert await peer.lookup.peek([1]) == 0


async def test_who_says_garbage_instead_of_a_greeting_is_shown_out(
    pair: KVPair,
) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(100), b"AKV1" + bytes(100)):
        with await RawConnection.dial(pair.server.url) as stranger:
            await stranger.send(data)
            with contextlib.suppress(ConnectionResetError):
                while await stranger.receive_some():
                    pass


@pytest.mark.trust
@pytest.mark.slow
async def test_a_greeting_that_trickles_in_is_not_waited_for(pair: KVPair) -> None:
    hello = Hello(1, 0, PeerIdentity("x", "1"), QUICK, ("inline",), 1)
    with await RawConnection.dial(pair.server.url) as stranger:
        with pytest.raises(OSError):
            for byte in encode_frame(0, hello)[0]:
                await stranger.send(bytes([byte]))
                await asyncio.sleep(0.25)
            raise AssertionError("it was let in")


Misbehave = Callable[[HostilePeer], Awaitable[object]]

WAYS: list[Misbehave] = [
    lambda hostile: hostile.send(1, Insert("x", 1, False), claim(2**60)),
    lambda hostile: hostile.send(1, Insert("x", 1, False), claim(3 * MIB)),
    lambda hostile: hostile.send(1, Select(False)),
    lambda hostile: hostile.send(2, Select(False)),
    lambda hostile: hostile.control.send(bytes(100_000)),
    lambda hostile: hostile.control.send(encode_frame(1, Peek(False))[0][:-1]),
    lambda hostile: hostile.lanes[0].send(bytes(100_000)),
    lambda hostile: asyncio.sleep(0),
]


@pytest.mark.slow
async def test_a_hundred_hostile_peers_at_once_keep_nobody_from_working(
    pair: KVPair,
) -> None:
    before = resident_bytes()
    async with contextlib.AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(open_hostile_peer(pair.server.url))
            for _ in range(100)
        ]
        for hostile, way in zip(opened, itertools.cycle(WAYS), strict=False):
            with contextlib.suppress(OSError):
                await way(hostile)
        await until(lambda: len(pair.server.peers) == 1)  # all but the honest one
        assert resident_bytes() - before < 64 * MIB
    await until(lambda: pair.lookup.statistics().entries == 0)


# The other way round: the server is the hostile one.


@contextlib.asynccontextmanager
async def hostile_server() -> AsyncIterator[tuple[asynckv.Peer, HostilePeer]]:
    with RawListener() as listener:
        peer = asynckv.connect(listener.url, lanes=1, reconnect_s=0, max_bytes="4MiB")
        accepting = asyncio.create_task(accept_hostile_peer(listener))
        async with asyncio.timeout(20), peer:
            yield peer, await accepting
            listener.close()  # else the peer waits a second for that


@contextlib.asynccontextmanager
async def asked() -> AsyncIterator[tuple[HostilePeer, asyncio.Future[asynckv.KVEntry]]]:
    """A hostile server that was asked for an entry, and who waits for it."""
    async with hostile_server() as (peer, server):
        selecting = asyncio.ensure_future(peer.lookup.drop_select([1, 2, 3]))
        await server.expect(Select)
        yield server, selecting


@pytest.mark.trust
@pytest.mark.parametrize(
    ("offer", "body"),
    [
        (Offer(2, False, "x", b"t", 1, 1), claim(2**60)),
        (Offer(2, False, "x", b"t", 1, 1), claim(2**40)),
        (Offer(2, True, "x", b"t", 1, 1), claim(2**40)),
        (Offer(2, True, "x", b"t", 1, 1), claim(100) + b"short"),
        (Offer(2, True, "x", b"t", 1, 1), b"no manifest"),
    ],
    ids=["2**60", "2**40", "2**40 inline", "short", "no manifest"],
)
async def test_a_server_that_lies_about_sizes_is_an_error(
    offer: Offer, body: bytes
) -> None:
    async with asked() as (server, selecting):
        before = resident_bytes()
        await server.send(1, offer, body)
        async with server.alive():
            with pytest.raises(asynckv.AsyncKVError):
                await selecting
        assert resident_bytes() - before < 32 * MIB


@pytest.mark.parametrize(
    ("stream", "frame"),
    [
        (1, Grant(2)),
        (3, Accepted()),
        (1, Select(False)),
        (2, Grant(1)),
        (0, Peek(False)),
    ],
)
async def test_a_server_that_talks_nonsense_is_an_error(
    stream: int, frame: Frame
) -> None:
    async with asked() as (server, selecting):
        await server.send(stream, frame)
        async with server.alive():
            with pytest.raises((asynckv.PeerLost, asynckv.ProtocolError)):
                await selecting


async def test_a_server_that_says_nothing_is_lost() -> None:
    async with hostile_server() as (peer, _):
        with pytest.raises(asynckv.PeerLost, match="3 heartbeats"):
            await peer.lookup.drop_select([1])


async def test_a_server_that_sends_other_bytes_is_found_out() -> None:
    async with asked() as (server, selecting):
        body = claim(100_000)
        await server.send(1, Offer(2, False, "x", b"t", 1, 3), body)
        await server.expect(Grant)
        await server.send_chunk(2, bytes(100_000))
        await server.send(1, Sent(2, 0, b"not this digest."))
        async with server.alive():
            with pytest.raises(asynckv.ChecksumError):
                await selecting

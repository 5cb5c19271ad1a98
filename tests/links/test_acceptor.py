from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from asynckv.errors import PeerLost
from asynckv.links import acceptor
from asynckv.links.acceptor import Acceptor, HalfOpen
from asynckv.links.address import parse_url
from asynckv.links.dial import _attach, dial
from asynckv.links.listen import LinkListener, listen
from asynckv.links.sockets import (
    connect,
    in_thread,
    read_first_frame,
    secure,
    send_first_frame,
)
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import (
    PROTOCOL_MAJOR,
    Attach,
    Attached,
    Frame,
    Hello,
    Ping,
    Pong,
    Refuse,
    Welcome,
)
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.protocol.wire import TYPE_CONTROL, checksum_of, pack_header
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.security.tls import read_tls
from asynckv.security.tls_socket import Connection, TlsSocket
from asynckv.testing.blocked import until
from asynckv.testing.certificates import Authority
from harness.link_pairs import ScriptedService

HELLO = Hello(
    PROTOCOL_MAJOR, 0, PeerIdentity("stranger", "1"), Limits(), ("inline",), 2
)


async def door(url: str = "tcp://:0", keyring: Keyring = NO_KEYS) -> LinkListener:
    return await listen(
        url,
        keyring=keyring,
        identity=PeerIdentity("far", "1"),
        service_for=lambda link: ScriptedService(),
        lanes=2,
    )


@pytest.fixture
async def listener() -> AsyncIterator[LinkListener]:
    listener = await door()
    yield listener
    await listener.aclose()


async def knock(listener: LinkListener, data: Frame | bytes) -> socket.socket:
    sock = await connect(parse_url(listener.url))
    if not isinstance(data, bytes):
        data = encode_frame(0, data)[0]
    await send_first_frame(sock, data)
    return sock


async def knock_over_tls(
    listener: LinkListener, authority: Authority, frame: Frame
) -> TlsSocket:
    """Knock as somebody with a certificate of its own."""
    keys = await in_thread(lambda: read_tls(authority.issue()))
    plain = await connect(parse_url(listener.url))
    sock = TlsSocket.over(plain, keys, dials="localhost")
    await secure(sock, keys)
    await send_first_frame(sock, encode_frame(0, frame)[0])
    return sock


async def is_hung_up(sock: socket.socket) -> bool:
    try:
        return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    except ConnectionResetError:
        return True


async def welcomed(listener: LinkListener) -> tuple[socket.socket, Welcome]:
    sock = await knock(listener, HELLO)
    answer = await read_first_frame(sock)
    assert isinstance(answer, Welcome)
    return sock, answer


@pytest.mark.both_loops
@pytest.mark.parametrize(
    "data",
    [
        Ping(1),
        Attach(b"no such token", 0),
        Hello(9, 0, HELLO.identity, Limits(), ("inline",), 2),
        Hello(PROTOCOL_MAJOR, 0, HELLO.identity, Limits(), ("carrier pigeon",), 2),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        pack_header(TYPE_CONTROL, 4097, 0),
    ],
)
async def test_a_greeting_that_will_not_do_is_refused(
    data: Frame | bytes, listener: LinkListener
) -> None:
    with await knock(listener, data) as sock:
        assert isinstance(await read_first_frame(sock), Refuse)
        assert await is_hung_up(sock)
    assert listener.links == ()


@pytest.mark.both_loops
async def test_a_link_is_there_once_all_its_lanes_are(listener: LinkListener) -> None:
    control, welcome = await welcomed(listener)
    lanes = []
    for lane in range(2):
        assert listener.links == ()
        lanes.append(await knock(listener, Attach(welcome.link_token, lane)))
        assert await read_first_frame(lanes[-1]) == Attached()
    await until(lambda: len(listener.links) == 1)
    for sock in (control, *lanes):
        sock.close()


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("lane", "proof"), [(0, b""), (2, b""), (2**40, b""), (1, b"of another link")]
)
async def test_a_lane_that_is_taken_or_not_of_its_link_is_refused(
    lane: int, proof: bytes, listener: LinkListener
) -> None:
    control, welcome = await welcomed(listener)
    first = await knock(listener, Attach(welcome.link_token, 0))
    assert await read_first_frame(first) == Attached()
    attach = Attach(welcome.link_token, lane, proof)
    with control, first, await knock(listener, attach) as sock:
        assert isinstance(await read_first_frame(sock), Refuse)


@pytest.mark.both_loops
async def test_a_lane_with_other_certificates_than_its_link_is_refused(
    authority: Authority,
) -> None:
    keyring = Keyring(tls=authority.issue())
    listener = await door("tls://127.0.0.1:0", keyring)
    control = await knock_over_tls(listener, authority, HELLO)
    welcome = await read_first_frame(control)
    assert isinstance(welcome, Welcome)
    attach = Attach(welcome.link_token, 0)
    with control, await knock_over_tls(listener, authority, attach) as lane:
        assert isinstance(await read_first_frame(lane), Refuse)
    await listener.aclose()


@pytest.mark.both_loops
async def test_a_link_whose_lanes_never_come_is_dropped(
    monkeypatch: pytest.MonkeyPatch, listener: LinkListener
) -> None:
    monkeypatch.setattr(acceptor, "_LANES_S", 0.05)
    control, welcome = await welcomed(listener)
    with control, await knock(listener, Attach(welcome.link_token, 0)) as lane:
        assert await read_first_frame(lane) == Attached()
        assert await is_hung_up(control)
        assert await is_hung_up(lane)


@pytest.mark.both_loops
async def test_who_hangs_up_before_its_lanes_came_is_not_waited_for(
    listener: LinkListener,
) -> None:
    assert isinstance(listener._acceptor, acceptor.Acceptor)
    greetings = listener._acceptor._greetings
    control, welcome = await welcomed(listener)
    with await knock(listener, Attach(welcome.link_token, 0)) as lane:
        assert await read_first_frame(lane) == Attached()
        assert len(greetings) == 1
        control.close()
        assert await is_hung_up(lane)
        await until(lambda: not greetings, timeout_s=1)


@pytest.mark.both_loops
async def test_late_lanes_of_a_link_that_was_given_up_warn_of_nothing(
    caplog: pytest.LogCaptureFixture, listener: LinkListener
) -> None:
    control, welcome = await welcomed(listener)
    with await knock(listener, Attach(welcome.link_token, 0)) as lane:
        assert await read_first_frame(lane) == Attached()
        control.close()
        assert await is_hung_up(lane)
    with await knock(listener, Attach(welcome.link_token, 1)) as lane:
        assert isinstance(await read_first_frame(lane), Refuse)
    assert [one for one in caplog.records if one.levelname == "WARNING"] == []


@pytest.mark.both_loops
async def test_what_is_sent_before_the_last_lane_is_left_to_the_link(
    listener: LinkListener,
) -> None:
    control, welcome = await welcomed(listener)
    await send_first_frame(control, encode_frame(0, Ping(7))[0])
    lanes = [
        await knock(listener, Attach(welcome.link_token, lane)) for lane in range(2)
    ]
    await until(lambda: len(listener.links) == 1)
    assert await read_first_frame(control, Limits()) == Pong(7)
    for sock in (control, *lanes):
        sock.close()


@pytest.mark.both_loops
async def test_one_that_never_greets_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, listener: LinkListener
) -> None:
    monkeypatch.setattr(acceptor, "_GREETING_S", 0.05)
    with await knock(listener, b"AKV1") as sock:
        assert await is_hung_up(sock)


@pytest.mark.both_loops
async def test_many_silent_half_open_keep_nobody_out(listener: LinkListener) -> None:
    silent = [await knock(listener, b"") for _ in range(acceptor.MAX_HALF_OPEN + 5)]
    link = await dial(listener.url, identity=PeerIdentity("honest", "1"), lanes=1)
    assert len(listener.links) == 1
    await link.aclose()
    for sock in silent:
        sock.close()


@pytest.mark.both_loops
async def test_a_lane_of_no_link_is_a_stranger_until_it_is_gone(
    listener: LinkListener,
) -> None:
    assert isinstance(listener._acceptor, Acceptor)
    greetings, sockets = listener._acceptor._greetings, []
    for _ in range(2 * acceptor.MAX_HALF_OPEN):
        sockets.append(await knock(listener, Attach(b"no such token", 0)))
        assert isinstance(await read_first_frame(sockets[-1]), Refuse)
        # A refusal lingers; it is one of the 64 for as long as it does.
        assert len(greetings) <= acceptor.MAX_HALF_OPEN + 1
    for sock in sockets:
        sock.close()


@pytest.mark.both_loops
async def test_many_links_whose_lanes_never_come_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "_MAX_PENDING", 8)
    listener = await door()
    controls = [(await welcomed(listener))[0] for _ in range(12)]
    link = await dial(listener.url, identity=PeerIdentity("honest", "1"), lanes=1)
    assert len(listener.links) == 1
    assert isinstance(listener._acceptor, Acceptor)
    assert len(listener._acceptor._pending) == 7  # the eight that stayed, without it
    await link.aclose()
    await listener.aclose()
    for sock in controls:
        sock.close()


@pytest.mark.both_loops
async def test_a_link_whose_lanes_come_does_not_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "_MAX_PENDING", 8)
    listener = await door()
    control, welcome = await welcomed(listener)
    with control, await knock(listener, Attach(welcome.link_token, 0)) as lane:
        assert await read_first_frame(lane) == Attached()
        others = [(await welcomed(listener))[0] for _ in range(60)]
        with await knock(listener, Attach(welcome.link_token, 1)) as last:
            assert await read_first_frame(last) == Attached()
            await until(lambda: len(listener.links) == 1)
    await listener.aclose()
    for sock in others:
        sock.close()


@pytest.mark.both_loops
async def test_a_link_that_had_to_give_way_is_a_lost_peer(
    monkeypatch: pytest.MonkeyPatch, listener: LinkListener
) -> None:
    real = _attach

    async def attach(*args: Any) -> Connection:
        assert isinstance(listener._acceptor, Acceptor)
        for task in list(listener._acceptor._greetings):
            task.cancel()
        return await real(*args)

    monkeypatch.setattr("asynckv.links.dial._attach", attach)
    with pytest.raises(PeerLost, match="gave this link up"):
        await dial(listener.url, identity=PeerIdentity("honest", "1"))


@pytest.mark.both_loops
async def test_there_are_never_more_half_open_than_places() -> None:
    listener = await door()
    half_open = listener._acceptor._half_open  # type: ignore[union-attr]
    sockets = []
    for _ in range(3 * acceptor.MAX_HALF_OPEN):
        sockets.append(await knock(listener, b"AKV1"))
        assert len(half_open) <= acceptor.MAX_HALF_OPEN
    await until(lambda: len(half_open) == acceptor.MAX_HALF_OPEN)
    hung_up = [asyncio.create_task(is_hung_up(sock)) for sock in sockets]
    await until(lambda: sum(t.done() for t in hung_up) == 2 * acceptor.MAX_HALF_OPEN)
    await listener.aclose()
    await asyncio.gather(*hung_up)
    for sock in sockets:
        sock.close()


@pytest.mark.both_loops
async def test_a_refusal_arrives_though_the_stranger_goes_on_talking(
    listener: LinkListener,
) -> None:
    for _ in range(10):
        with await knock(
            listener, pack_header(TYPE_CONTROL, 4097, 0) + bytes(9000)
        ) as s:
            answer = await read_first_frame(s)
            assert isinstance(answer, Refuse)


@pytest.mark.both_loops
async def test_many_refusals_are_warned_of_once(
    caplog: pytest.LogCaptureFixture, listener: LinkListener
) -> None:
    for _ in range(5):
        with await knock(listener, Ping(1)) as sock:
            assert isinstance(await read_first_frame(sock), Refuse)
    (line,) = [r.message for r in caplog.records if "is refused" in r.message]
    assert "connection from 127.0.0.1 is refused" in line


@pytest.mark.both_loops
async def test_a_stranger_writes_no_line_of_the_log(
    caplog: pytest.LogCaptureFixture, listener: LinkListener
) -> None:
    control = msgspec.msgpack.encode({"t": "hello", "x\nCRITICAL root: hacked\x1b[": 1})
    data = pack_header(TYPE_CONTROL, len(control), 0, 0, checksum=checksum_of(control))
    with await knock(listener, data + control) as sock:
        assert isinstance(await read_first_frame(sock), Refuse)
    (told,) = [r.getMessage() for r in caplog.records if "is refused" in r.message]
    assert "hacked" in told
    assert told.isprintable()


@pytest.mark.both_loops
async def test_closing_ends_greetings_under_way() -> None:
    listener = await door()
    silent = await knock(listener, b"AKV1")
    control, _ = await welcomed(listener)
    await listener.aclose()
    with silent, control:
        assert await is_hung_up(silent)
        assert await is_hung_up(control)


@pytest.mark.both_loops
async def test_accepting_goes_on_when_descriptors_were_short_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    listener: LinkListener,
) -> None:
    monkeypatch.setattr("asynckv.links.acceptor._NO_FILES_PAUSE_S", 0.0)
    monkeypatch.setattr("asynckv.links.acceptor._WARNING_PAUSE_S", 60.0)
    real, refusals = socket.socket.accept, [OSError(24, "Too many open files")] * 5

    def accept(sock: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return real(sock)

    monkeypatch.setattr(socket.socket, "accept", accept)
    link = await dial(listener.url, identity=PeerIdentity("late", "1"), lanes=1)
    await link.aclose()
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert warnings == [
        f"cannot accept at {listener.url}: [Errno 24] Too many open files"
    ]


@pytest.mark.both_loops
async def test_connections_are_taken_one_by_one_while_somebody_is_being_heard(
    listener: LinkListener,
) -> None:
    acceptor, taken = listener._acceptor, set[int]()
    assert isinstance(acceptor, Acceptor)

    def are_taken() -> bool:
        acceptor._turns.note_received(1)
        taken.add(len(acceptor._greetings))
        return len(acceptor._greetings) == 3

    assert not are_taken()
    half_open = [socket.socket() for _ in range(3)]
    address = parse_url(listener.url)
    for sock in half_open:
        sock.setblocking(False)
        sock.connect_ex((address.host, address.port))
    await until(are_taken)
    assert taken == {0, 1, 2, 3}
    for sock in half_open:
        sock.close()


HOSTS = ("", "10.0.0.1", "10.0.0.2", "10.0.1.1", "fd00::1", "fd00:0:0:1::1")


def filled(hosts: Iterable[str], *, places: int) -> HalfOpen[tuple[str, int]]:
    """One of each; they are called by their host and a number."""
    half_open = HalfOpen[tuple[str, int]](places)
    for number, host in enumerate(hosts):
        assert half_open.add((host, number), host) is None
    return half_open


def test_one_goes_when_there_is_no_room() -> None:
    half_open = filled(["10.0.0.1", "10.0.0.1"], places=2)
    victim = half_open.add(("new", 0), "10.0.0.1")
    assert victim in {("10.0.0.1", 0), ("10.0.0.1", 1)}
    assert len(half_open) == 2


def test_who_has_proved_itself_takes_no_place() -> None:
    half_open = HalfOpen[int](1)
    half_open.add(1, "10.0.0.1")
    half_open.discard(1)
    half_open.discard(1)
    assert half_open.add(2, "10.0.0.1") is None


@pytest.mark.parametrize(
    ("honest", "flood"),
    [
        ("10.0.0.1", ["10.0.0.2"]),
        ("", ["10.0.0.2"]),
        ("10.0.0.1", [f"10.0.1.{number}" for number in range(250)]),
        ("fd00::1", [f"fd00:0:0:1::{number}" for number in range(250)]),
    ],
    ids=["another host", "this host", "a network", "an IPv6 network"],
)
def test_a_flood_takes_no_place_of_another_host_or_network(
    honest: str, flood: list[str]
) -> None:
    half_open = filled([honest, *flood[:1] * 3], places=4)
    for number in range(250):
        half_open.add(("flood", number), flood[number % len(flood)])
    half_open.add(("honest too", 0), honest)
    assert {(honest, 0), ("honest too", 0)} <= set(half_open._origins)


def test_a_flood_from_everywhere_leaves_a_place_to_chance() -> None:
    """Were it the oldest that goes, nobody would last for 64 others."""
    stayed = 0
    for _ in range(100):
        half_open = filled([f"10.0.{number}.1" for number in range(64)], places=64)
        for number in range(64):
            half_open.add(("flood", number), f"10.1.{number}.1")
        stayed += ("10.0.0.1", 0) in half_open._origins
    assert 7 < stayed < 65  # 36 are expected, and 6 standard deviations are 29


def test_who_says_nothing_goes_first_wherever_it_is() -> None:
    half_open = filled([f"10.0.0.{number}" for number in range(8)], places=64)
    for number in range(8):
        half_open.note_spoken((f"10.0.0.{number}", number))
    for number in range(200):
        half_open.add(("flood", number), f"10.1.{number}.1")
    assert {(f"10.0.0.{number}", number) for number in range(8)} <= set(
        half_open._origins
    )


def test_who_was_not_listened_to_yet_is_not_silent() -> None:
    spoken = {("10.0.0.1", 0), ("10.0.1.1", 1)}
    half_open = HalfOpen[tuple[str, int]](3, spoken.__contains__)
    for number in range(3):
        host = f"10.0.{number}.1"
        half_open.add((host, number), host)
    for number in range(20):
        victim = half_open.add(("flood", number), f"10.1.{number}.1")
        assert victim not in spoken


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(HOSTS))))
def test_there_are_never_too_many_and_the_newest_stays(
    came: list[tuple[int, str]],
) -> None:
    half_open, inside = HalfOpen[tuple[int, int]](4), set()
    for turn, (number, host) in enumerate(came):
        inside.add((turn, number))
        victim = half_open.add((turn, number), host)
        assert victim != (turn, number)
        if victim is not None:
            inside.remove(victim)
        assert len(half_open) == len(inside) <= 4
        if number % 2:
            half_open.note_spoken((turn, number))

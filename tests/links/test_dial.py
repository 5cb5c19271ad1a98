from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from asynckv.errors import (
    AuthError,
    ConfigError,
    IncompatiblePeer,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    WrongLoop,
)
from asynckv.links.address import parse_url
from asynckv.links.dial import dial
from asynckv.links.end import GRACE_S
from asynckv.links.link import Link
from asynckv.links.listen import LinkListener, listen
from asynckv.links.options import cores, default_lanes, keys_of, make_terms
from asynckv.links.sockets import bind
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.failures import to_refuse
from asynckv.protocol.frames import PROTOCOL_MAJOR, Frame, Peek, Result, Welcome
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.security.keyring import Keyring
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.faults.hostile import open_hostile_peer
from asynckv.types import KVFingerprint
from harness.link_pairs import Hearer, ScriptedService, linked, name_of

ME = PeerIdentity("me", "1")
RESET = b"\1\0\0\0\0\0\0\0"
WELCOME = Welcome(PROTOCOL_MAJOR, 0, ME, Limits(), "inline", 1, b"token")


@contextlib.asynccontextmanager
async def listening(url: str = "tcp://:0") -> AsyncIterator[LinkListener]:
    listener = await listen(
        url, identity=name_of("far"), service_for=lambda link: ScriptedService()
    )
    try:
        yield listener
    finally:
        await listener.aclose()


@contextlib.asynccontextmanager
async def impostor(*answers: Frame | bytes) -> AsyncIterator[str]:
    """Somebody who gives the n-th connection the n-th answer, and then waits."""
    loop = asyncio.get_running_loop()
    with await bind(parse_url("tcp://:0")) as sock, contextlib.ExitStack() as stack:

        async def play() -> None:
            for answer in answers:
                peer, _ = await loop.sock_accept(sock)
                stack.enter_context(peer)
                await loop.sock_recv(peer, 5000)
                raw = answer if isinstance(answer, bytes) else None
                raw = encode_frame(0, answer)[0] if raw is None else raw  # type: ignore[arg-type]
                await loop.sock_sendall(peer, raw)

        task = asyncio.create_task(play())
        try:
            yield f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            task.cancel()
            await asyncio.wait({task})


@pytest.mark.both_loops
@pytest.mark.parametrize("url", ["tcp://:0", "mem://"])
async def test_a_dialled_link_knows_its_peer(url: str) -> None:
    fingerprint = KVFingerprint("model")
    options = {"fingerprint": fingerprint, "digest": "off"}
    async with linked(url, near=options, far=options) as pair:
        assert pair.near.peer.id.startswith("far-")
        assert pair.far.peer.id.startswith("near-")
        assert pair.near.fingerprint == pair.far.fingerprint == fingerprint
        assert pair.near.digest == pair.far.digest == "off"
        assert pair.near.url == pair.listener.url


@pytest.mark.both_loops
async def test_limits_are_the_smaller_of_both_and_each_keeps_its_own() -> None:
    near = {"limits": Limits(max_streams=5, max_receive_bytes=100)}
    far = {"limits": Limits(heartbeat_ms=1000)}
    async with linked(near=near, far=far) as pair:
        assert pair.near.limits == pair.far.limits
        assert pair.near.limits.heartbeat_ms == 1000
        assert pair.far.peer_limits.max_receive_bytes == 100
        assert pair.near.peer_limits.max_receive_bytes == Limits().max_receive_bytes


@pytest.mark.both_loops
@pytest.mark.parametrize("url", ["tcp://:0", "mem://"])
async def test_another_fingerprint_is_refused_and_its_field_named(url: str) -> None:
    far = {"fingerprint": KVFingerprint("m", dtype="bf16")}
    async with linked(url, far=far) as pair:
        pass
    listener = await listen(
        url,
        identity=ME,
        service_for=lambda link: ScriptedService(),
        fingerprint=KVFingerprint("m", dtype="bf16"),
    )
    with pytest.raises(IncompatiblePeer, match="fp8") as caught:
        await dial(
            listener.url, identity=ME, fingerprint=KVFingerprint("m", dtype="fp8")
        )
    assert caught.value.field == "dtype"
    assert listener.links == ()
    await listener.aclose()
    assert not pair.near.is_open


@pytest.mark.both_loops
@pytest.mark.parametrize("url", ["tcp://127.0.0.1:1", "mem://nobody"])
async def test_nobody_there_is_said_with_what_to_do(url: str) -> None:
    with pytest.raises(PeerLost, match="nobody listens") as caught:
        await dial(url, identity=ME)
    assert caught.value.hint


@pytest.mark.both_loops
async def test_one_that_listens_and_never_answers_is_given_up() -> None:
    with await bind(parse_url("tcp://:0")) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerLost, match=r"did not answer within 0\.05 s") as caught:
            await dial(url, identity=ME, timeout_s=0.05)
    assert "something listens" in caught.value.hint


@pytest.mark.both_loops
async def test_the_callers_own_timeout_stays_a_timeout() -> None:
    with await bind(parse_url("tcp://:0")) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await dial(url, identity=ME)


@pytest.mark.both_loops
async def test_something_else_than_asynckv_is_recognised() -> None:
    async with impostor(b"SSH-2.0-OpenSSH_9.6 and so on, and so on") as url:
        with pytest.raises(RemoteProtocolError, match="something else than asynckv"):
            await dial(url, identity=ME)


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([to_refuse(AuthError("who are you"))], AuthError),
        ([to_refuse(RemoteProtocolError("what"))], LocalProtocolError),
        ([Peek(has_key=True)], RemoteProtocolError),
        ([WELCOME, WELCOME], RemoteProtocolError),
        ([WELCOME, to_refuse(AuthError("no such link"))], AuthError),
    ],
)
async def test_a_handshake_that_goes_wrong_leaves_nothing(
    answers: list[Frame], error: type[Exception]
) -> None:
    async with impostor(*answers) as url:
        with pytest.raises(error):
            await dial(url, identity=ME, lanes=1)


@pytest.mark.both_loops
async def test_dial_can_be_cancelled_at_every_tick() -> None:
    async with listening() as listener:
        link = None
        ticks = 0
        while link is None:
            task = asyncio.create_task(dial(listener.url, identity=ME, lanes=2))
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            link = None if task.cancelled() else task.result()
            ticks += 1
        await link.aclose()
    assert ticks > 3


@pytest.mark.both_loops
async def test_dial_in_a_cancelled_scope_leaves_nothing() -> None:
    async with listening() as listener:
        with anyio.move_on_after(0) as scope:
            await dial(listener.url, identity=ME)
        assert scope.cancelled_caught


@pytest.mark.both_loops
async def test_a_dial_that_waits_for_its_lanes_can_be_cancelled() -> None:
    async with impostor(WELCOME) as url:
        task = asyncio.create_task(dial(url, identity=ME, lanes=1))
        await until_blocked(task)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


@pytest.mark.both_loops
async def test_a_link_dialled_in_one_task_is_used_and_closed_in_others() -> None:
    async with listening() as listener:
        link = await asyncio.create_task(dial(listener.url, identity=ME))
        hearer = Hearer()
        link.open_stream(hearer, Peek(has_key=True))
        await asyncio.create_task(hearer.next())
        await asyncio.create_task(link.aclose())


@pytest.mark.both_loops
@pytest.mark.parametrize("lanes", [0, -1, 9])
async def test_an_impossible_number_of_lanes_is_refused(lanes: int) -> None:
    with pytest.raises(ConfigError, match="lanes"):
        await dial("tcp://:1", identity=ME, lanes=lanes)


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("count", "lanes"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (64, 4)]
)
def test_half_of_the_cores_have_a_lane_each_and_at_most_four(
    count: int, lanes: int
) -> None:
    assert default_lanes(count) == lanes


@pytest.mark.both_loops
def test_lanes_are_those_of_the_cores_unless_told_otherwise() -> None:
    terms = make_terms(
        parse_url("tcp://:1"),
        identity=ME,
        fingerprint=None,
        digest="full",
        lanes=None,
        limits=Limits(),
    )
    assert terms.lanes == default_lanes(cores())


@pytest.mark.both_loops
@pytest.mark.parametrize(
    "linger", [bytes(8), b"\1\0\0\0\0\0\0\0"], ids=["end", "reset"]
)
async def test_a_killed_peer_is_lost_at_once(
    monkeypatch: pytest.MonkeyPatch, linger: bytes
) -> None:
    # The killed one ends by no goodbye.
    monkeypatch.setattr("asynckv.links.link.GRACE_S", 0.01)
    async with linked(answer=lambda *_: None) as pair:
        sock: socket.socket = pair.far._stream._sock  # type: ignore[attr-defined]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        hearer = Hearer()
        pair.near.open_stream(hearer, Peek(has_key=True))
        await until(lambda: len(pair.service.asked) == 1)
        pair.far._stream.abort()
        assert not (await hearer.loss()).goodbye


@pytest.mark.both_loops
async def test_a_process_without_file_descriptors_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(PeerLost, match="Too many open files") as caught:
        await dial("tcp://127.0.0.1:1", identity=name_of("consumer"))
    assert "ulimit -n" in caught.value.hint


async def test_both_ends_are_there_when_dial_returns() -> None:
    async with linked("mem://") as pair:
        assert pair.listener.links == (pair.far,)


async def test_a_listener_on_another_loop_is_named_as_such() -> None:
    listener = await listen(
        "mem://here", identity=ME, service_for=lambda link: ScriptedService()
    )

    def elsewhere() -> None:
        asyncio.run(_fail_to_dial())

    async def _fail_to_dial() -> None:
        with pytest.raises(WrongLoop):
            await dial("mem://here", identity=ME)

    await asyncio.to_thread(elsewhere)
    await listener.aclose()


async def test_a_listener_that_was_dropped_is_not_found() -> None:
    listener = await listen(
        "mem://dropped", identity=ME, service_for=lambda link: ScriptedService()
    )
    listener.abort()
    with pytest.raises(PeerLost, match="of this process only"):
        await dial("mem://dropped", identity=ME)


async def test_a_door_that_closes_while_its_keys_are_read_lets_nobody_in(
    tmp_path: Path,
) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("correct-horse-battery-staple-0123")
    keyring = Keyring(secret_file=str(path))
    listener = await listen(
        "mem://closing",
        identity=ME,
        service_for=lambda link: ScriptedService(),
        keyring=keyring,
    )
    keyring._checked_at = 0.0
    secrets = Keyring(secrets=(await keys_of(keyring)).secrets)
    keyring._checked_at = 0.0
    task = asyncio.create_task(dial("mem://closing", identity=ME, keyring=secrets))
    await asyncio.sleep(0)
    listener.abort()
    with pytest.raises(PeerLost, match="nobody listens"):
        await task


YOU = PeerIdentity("you", "1")


async def door(url: str = "tcp://:0") -> LinkListener:
    return await listen(url, identity=YOU, service_for=lambda link: ScriptedService())


@pytest.fixture
async def listener() -> AsyncIterator[LinkListener]:
    listener = await door()
    yield listener
    await listener.aclose()


@pytest.mark.both_loops
async def test_port_0_takes_a_free_port(listener: LinkListener) -> None:
    assert not listener.url.endswith(":0")


@pytest.mark.both_loops
async def test_a_name_in_memory_is_free_again_after_the_close() -> None:
    for _ in range(2):
        listener = await door("mem://same")
        with pytest.raises(ConfigError, match="already"):
            await door("mem://same")
        await listener.aclose()


@pytest.mark.both_loops
async def test_listeners_without_a_name_get_different_ones() -> None:
    one, two = await door("mem://"), await door("mem://")
    assert one.url != two.url
    await one.aclose()
    await two.aclose()


@pytest.mark.both_loops
async def test_the_socket_file_is_gone_after_the_close(tmp_path: Path) -> None:
    listener = await door(f"unix://{tmp_path}/a.sock")
    assert (tmp_path / "a.sock").exists()
    await listener.aclose()
    await listener.aclose()
    assert not (tmp_path / "a.sock").exists()


@pytest.mark.both_loops
@pytest.mark.parametrize("incarnation", ["1", "2"])
async def test_a_second_link_of_a_peer_ends_the_first(
    incarnation: str, listener: LinkListener
) -> None:
    first = await dial(listener.url, identity=ME)
    second = await dial(listener.url, identity=PeerIdentity("me", incarnation))
    await first.wait_closed()
    await until(lambda: len(listener.links) == 1)
    hearer = Hearer()
    second.open_stream(hearer, Peek(has_key=True))
    assert await hearer.next() == (Result(0), b"")
    assert not first.is_open
    await second.aclose()


@pytest.mark.both_loops
async def test_different_peers_keep_their_links(listener: LinkListener) -> None:
    links = [
        await dial(listener.url, identity=PeerIdentity(str(n), "1")) for n in range(5)
    ]
    await until(lambda: len(listener.links) == 5)
    for link in links:
        await link.aclose()
    await until(lambda: listener.links == ())


@pytest.mark.both_loops
async def test_fifty_may_dial_at_once(listener: LinkListener) -> None:
    links = await asyncio.gather(
        *(dial(listener.url, identity=PeerIdentity(str(n), "1")) for n in range(50))
    )
    assert len(listener.links) == 50
    await asyncio.gather(*(link.aclose() for link in links))


@pytest.mark.both_loops
async def test_who_comes_who_leaves_and_who_is_lost_is_a_line_of_the_log_each(
    caplog: pytest.LogCaptureFixture, listener: LinkListener
) -> None:
    caplog.set_level(logging.INFO)
    url = listener.url
    await (await dial(url, identity=ME)).aclose()
    await until(lambda: listener.links == ())
    (await dial(url, identity=ME)).abort()
    await until(lambda: listener.links == () and len(caplog.records) == 4)
    came, left, again, lost = (record.getMessage() for record in caplog.records)
    assert came == again == f"{url}: me connected, payload by inline"
    assert left == f"{url}: me left"
    assert lost.startswith(f"{url}: me is lost: ")


@pytest.mark.both_loops
async def test_closing_the_listener_says_goodbye_to_all() -> None:
    async with linked() as pair:
        await pair.listener.aclose()
        await pair.near.wait_closed()
        assert pair.near.error is not None and pair.near.error.goodbye
        with pytest.raises(PeerLost):
            await dial(pair.listener.url, identity=ME)


@pytest.mark.both_loops
async def test_a_released_link_outlives_its_listener() -> None:
    async with linked() as pair:
        pair.listener.release(pair.far)
        await pair.listener.aclose()
        hearer = Hearer()
        pair.near.open_stream(hearer, Peek(has_key=False))
        assert await hearer.next() == (Result(0), b"")
        pair.far.abort()


@pytest.mark.both_loops
async def test_aborting_the_listener_ends_all_without_a_word() -> None:
    async with linked() as pair:
        pair.listener.abort()
        await pair.near.wait_closed()
        assert pair.near.error is not None and not pair.near.error.goodbye


@pytest.mark.both_loops
async def test_a_cancelled_close_leaves_nothing_open() -> None:
    async with linked() as pair:
        pair.near._stream.pause_reading()
        closing = asyncio.create_task(pair.listener.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert not pair.far.is_open


@pytest.mark.both_loops
async def test_a_link_that_nobody_will_serve_is_aborted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(link: Link) -> ScriptedService:
        raise RuntimeError("on purpose")

    listener = await listen("tcp://:0", identity=YOU, service_for=refuse)
    link = await dial(listener.url, identity=ME)
    await link.wait_closed()
    assert "on purpose" in caplog.text
    await listener.aclose()
    await link.aclose()


@pytest.mark.both_loops
async def test_a_link_that_was_refused_is_closed_with_the_listener() -> None:
    listener = await door()
    async with open_hostile_peer(listener.url) as hostile:
        (link,) = listener.links
        await hostile.send(0, Peek(has_key=False))
        await until(lambda: not listener.links)
        await listener.aclose()
        async with asyncio.timeout(GRACE_S / 2):
            await link.wait_closed()

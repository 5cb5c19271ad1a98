"""Who gets in with a shared secret, where we listen, and that nothing is dialled."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest
import torch

import asynckv
from asynckv.errors import AsyncKVError, AuthError, ConfigError, PeerLost
from asynckv.links.address import parse_url
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.links.listen import LinkListener, listen
from asynckv.links.options import keys_of, make_keyring
from asynckv.links.sockets import (
    connect,
    converse,
    read_first_frame,
    send_first_frame,
)
from asynckv.node import open as open_node
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import Attach, Attached, OpeningFrame, Peek, Refuse
from asynckv.protocol.handshake import Terms
from asynckv.protocol.hello import DialSide
from asynckv.protocol.values import PeerIdentity
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.security.shared_secret import new_nonce
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.pairs import Scheme, new_url, open_group, open_pipe_pair
from asynckv.types import TensorSpec
from harness.link_pairs import Hearer, ScriptedService, linked, name_of

on_linux = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="the kernel tells it on Linux only"
)

SCHEMES: tuple[Scheme, ...] = ("tcp", "unix", "mem")
LARGE = torch.arange(100_000, dtype=torch.float32)

Make = Callable[..., Path]


def keyring_of(path: Path) -> Keyring:
    return Keyring(secret_file=str(path))


@contextlib.asynccontextmanager
async def listening(keyring: Keyring, url: str = "tcp://:0") -> AsyncIterator[str]:
    listener = await listen(
        url,
        identity=name_of("far"),
        service_for=lambda link: ScriptedService(),
        keyring=keyring,
        lanes=2,
    )
    try:
        yield listener.url
        await until(lambda: listener.links == ())
    finally:
        await listener.aclose()


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_buffers_are_served_to_those_who_share_the_secret(
    scheme: Scheme, make_secret: Make
) -> None:
    path = make_secret()
    async with (
        asynckv.LookupBuffer("4MiB") as buffer,
        asynckv.serve(new_url(scheme), lookup=buffer, secret_file=path) as server,
        asynckv.connect(server.url, secret_file=path) as peer,
    ):
        await peer.lookup.insert([1, 2], None, LARGE, None, None)
        entry = await peer.lookup.drop_select([1, 2])
        assert isinstance(entry.key, torch.Tensor)
        assert torch.equal(entry.key, LARGE)


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_pipe_is_opened_by_those_who_share_the_secret(
    scheme: Scheme, make_secret: Make
) -> None:
    async with open_pipe_pair(scheme, secret_file=make_secret()) as (near, far):
        await near.send_tensor(LARGE)
        received = await far.recv_tensor()
        assert received is not None
        assert torch.equal(received, LARGE)


@pytest.mark.both_loops
async def test_a_group_shares_one_secret(make_secret: Make) -> None:
    async with open_group(3, secret_file=make_secret()) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))


@pytest.mark.both_loops
async def test_a_node_takes_the_secret_from_its_configuration(
    make_secret: Make,
) -> None:
    path = make_secret()
    extra: dict[str, object] = {"secret_file": str(path)}
    config = asynckv.KVTransferConfig(
        kv_role="kv_producer", kv_port=0, kv_connector_extra_config=extra
    )
    async with open_node(config) as node:
        async with asynckv.connect(node.url, secret_file=path):
            pass
        with pytest.raises(AuthError):
            async with asynckv.connect(node.url, secret_file=make_secret()):
                pass


@pytest.mark.both_loops
@pytest.mark.parametrize("variable", ["ASYNCKV_SECRET_FILE", "ASYNCKV_SECRET"])
async def test_the_environment_has_the_secret_of_all(
    variable: str, make_secret: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_secret()
    is_path = variable.endswith("FILE")
    monkeypatch.setenv(variable, str(path) if is_path else path.read_text())
    async with asynckv.listen_pipe("tcp://:0") as listener:
        monkeypatch.delenv(variable)
        with pytest.raises(AuthError):
            async with asynckv.open_pipe(listener.url):
                pass
        async with asynckv.open_pipe(listener.url, secret_file=path):
            pass


@pytest.mark.both_loops
@pytest.mark.refusal
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("ours", "theirs"), [(0, 1), (0, None), (None, 1)])
async def test_without_the_same_secret_nobody_gets_in(
    scheme: Scheme, ours: int | None, theirs: int | None, make_secret: Make
) -> None:
    keyrings = {0: keyring_of(make_secret()), 1: keyring_of(make_secret())}
    far = NO_KEYS if theirs is None else keyrings[theirs]
    near = NO_KEYS if ours is None else keyrings[ours]
    async with listening(far, new_url(scheme)) as url:
        for _ in range(3):
            with pytest.raises(AuthError, match="no proof of a shared secret"):
                await dial(url, identity=name_of("near"), keyring=near, timeout_s=5)


@pytest.mark.both_loops
async def test_secrets_are_exchanged_while_links_stay_up(make_secret: Make) -> None:
    old, new = (make_secret().read_text().strip() for _ in range(2))
    far_path, near_path = make_secret(old), make_secret(old)
    far, near = keyring_of(far_path), keyring_of(near_path)
    async with linked(far={"keyring": far}, near={"keyring": near}) as pair:
        url, identity = pair.listener.url, PeerIdentity("again", "1")
        for path, text in (
            (far_path, f"{old}\n{new}"),  # listeners take both
            (near_path, f"{new}\n{old}"),  # those who dial use the new one
            (far_path, new),  # nobody uses the old one any more
        ):
            path.write_text(text)
            far._checked_at = near._checked_at = 0.0
            link = await dial(url, identity=identity, keyring=near)
            await link.aclose()
        assert pair.near.is_open
        with pytest.raises(AuthError):
            await dial(url, identity=identity, keyring=keyring_of(make_secret(old)))


async def near_side(path: Path) -> DialSide:
    identity = name_of("mallory")
    terms = Terms(identity=identity, payload_paths=("inline",), lanes=2)
    keys = await keys_of(keyring_of(path))
    return DialSide(terms, keys.first_secret, nonce=new_nonce())


async def welcomed(url: str, path: Path) -> tuple[socket.socket, DialSide]:
    """A connection with which a link was agreed on; its lanes are missing."""
    side = await near_side(path)
    sock = await connect(parse_url(url))
    await send_first_frame(sock, side.hello)
    await converse(sock, side)
    return sock, side


async def answer_to(url: str, *said: bytes) -> object:
    """What a listener says to the last of these."""
    with await connect(parse_url(url)) as sock:
        for data in said:
            await send_first_frame(sock, data)
            answer = await read_first_frame(sock)
        return answer


@pytest.mark.both_loops
@pytest.mark.refusal
async def test_a_lane_with_a_stolen_or_guessed_token_is_refused(
    make_secret: Make,
) -> None:
    path = make_secret()
    async with listening(keyring_of(path)) as url:
        sock, side = await welcomed(url, path)
        other_sock, other = await welcomed(url, path)
        token, lane_proofs = side.outcome().link_token, side.outcome().lane_proofs
        stolen = other.outcome().lane_proofs.prove("dialling", 0)
        for attach in (
            Attach(token, 0),
            Attach(token, 0, bytes(32)),
            Attach(token, 0, stolen),
            Attach(token, 0, lane_proofs.prove("dialling", 1)),
            Attach(token, 0, lane_proofs.prove("listening", 0)),
            Attach(b"guessed", 0, lane_proofs.prove("dialling", 0)),
        ):
            answer = await answer_to(url, encode_frame(0, attach)[0])
            assert isinstance(answer, Refuse)
            assert answer.code == "AuthError"
        right = Attach(token, 0, lane_proofs.prove("dialling", 0))
        assert isinstance(await answer_to(url, encode_frame(0, right)[0]), Attached)
        sock.close()
        other_sock.close()


@pytest.mark.both_loops
@pytest.mark.refusal
async def test_a_handshake_that_was_overheard_lets_nobody_in(
    make_secret: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = make_secret(), []
    async with listening(keyring_of(path)) as url:

        async def overheard(sock: object, data: bytes) -> None:
            said.append(data)
            await send_first_frame(sock, data)  # type: ignore[arg-type]

        monkeypatch.setattr("asynckv.links.dial.send_first_frame", overheard)
        monkeypatch.setattr("asynckv.links.sockets.send_first_frame", overheard)
        link = await dial(url, identity=name_of("near"), keyring=keyring_of(path))
        monkeypatch.undo()
        hello, attaches = said[0], [d for d in said if b"attach" in d]
        (proof,) = (d for d in said if b"proof" in d and b"mac" in d and len(d) < 120)
        answer = await answer_to(url, hello, proof)
        assert isinstance(answer, Refuse)
        for attach in attaches:
            assert isinstance(await answer_to(url, attach), Refuse)
        await link.aclose()


@pytest.mark.both_loops
@pytest.mark.refusal
async def test_a_proof_that_comes_too_late_is_hung_up_on(
    make_secret: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckv.links.acceptor._GREETING_S", 0.05)
    path = make_secret()
    side = await near_side(path)
    async with listening(keyring_of(path)) as url:
        with await connect(parse_url(url)) as sock:
            await send_first_frame(sock, side.hello)
            with pytest.raises(PeerLost, match="hung up"):
                await read_first_frame(sock)
                await read_first_frame(sock)


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_dialling_with_a_secret_is_cancelled_at_every_suspension(
    scheme: Scheme, make_secret: Make
) -> None:
    path = make_secret()
    far = keyring_of(path)

    async def close(k: int, mode: CancelMode, outcome: Outcome[Link]) -> None:
        if outcome.value is not None:
            await outcome.value.aclose()

    async with listening(far, new_url(scheme)) as url:
        counts = await sweep_cancellation(
            lambda: dial(
                url, identity=name_of("near"), keyring=keyring_of(path), lanes=2
            ),
            close,
            modes=("task", "scope", "completion"),
        )
    assert counts.cancelled >= 3


@pytest.mark.both_loops
async def test_keys_that_cannot_be_read_are_told_where_a_link_is_opened(
    make_secret: Make,
) -> None:
    path = make_secret(mode=0o644)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        await dial("tcp://:1", identity=name_of("near"), keyring=keyring_of(path))
    with pytest.raises(ConfigError, match="chmod 600"):
        async with asynckv.serve(
            "tcp://:0", store=asynckv.StoreBuffer("1MiB"), secret_file=path
        ):
            pass


@pytest.mark.both_loops
@pytest.mark.refusal
@pytest.mark.parametrize("url", ["tcp://0.0.0.0:0", "tcp://[::]:0"])
async def test_other_machines_reach_only_what_is_protected(
    url: str, make_secret: Make, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_secret()
    with pytest.raises(ConfigError, match="prove who it is"):
        await _listen(url, make_keyring(None, None, True, {}))
    with pytest.raises(ConfigError, match="in the clear"):
        await _listen(url, make_keyring(path, None, False, {}))
    with caplog.at_level(logging.WARNING):
        listener = await _listen(url, make_keyring(path, None, True, {}))
    assert "plaintext" in caplog.text
    await listener.aclose()


@pytest.mark.both_loops
@pytest.mark.refusal
async def test_dialling_other_machines_asks_for_the_same(make_secret: Make) -> None:
    for options, message in (
        ({}, "prove who it is"),
        ({"secret_file": make_secret()}, "in the clear"),
    ):
        with pytest.raises(ConfigError, match=message):
            async with asynckv.connect("tcp://192.0.2.1:7000", **options):  # type: ignore[arg-type]
                pass


async def _listen(url: str, keyring: Keyring) -> LinkListener:
    return await listen(
        url,
        identity=name_of("far"),
        service_for=lambda link: ScriptedService(),
        keyring=keyring,
    )


@pytest.mark.both_loops
async def test_no_secret_is_ever_logged(
    make_secret: Make, caplog: pytest.LogCaptureFixture
) -> None:
    path, other = make_secret(), make_secret()
    with caplog.at_level(logging.DEBUG):
        async with listening(keyring_of(path)) as url:
            for each in (path, other):
                with contextlib.suppress(AsyncKVError):
                    link = await dial(
                        url, identity=name_of("near"), keyring=keyring_of(each)
                    )
                    await link.aclose()
    assert "refused" in caplog.text
    for each in (path, other):
        assert each.read_text().strip() not in caplog.text


LISTENING = "0A"
FAMILIES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}


def listening_hosts() -> list[str]:
    """The addresses at which this process listens now.

    A table that changes while it is read may name one of them twice.
    """
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{fd}"):
            mine |= set(
                re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{fd}"))
            )
    found = {
        inode: host_of(local, family)
        for name, family in FAMILIES.items()
        for _, local, _, state, _, _, _, _, _, inode, *_ in map(
            str.split, Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        )
        if state == LISTENING and inode in mine
    }
    return [*found.values()]


def host_of(local: str, family: socket.AddressFamily) -> str:
    words = re.findall("." * 8, local.partition(":")[0])
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return socket.inet_ntop(family, packed)


def new_buffers() -> asynckv.LookupBuffer:
    return asynckv.LookupBuffer("1MiB", drain_s=0)


OPENERS: dict[str, Callable[[str], AbstractAsyncContextManager[Any]]] = {
    "serve": lambda url: asynckv.serve(url, lookup=new_buffers()),
    "listen_pipe": asynckv.listen_pipe,
}


@on_linux
@pytest.mark.refusal
@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("host", ["", "localhost", "127.0.0.1", "[::1]"])
async def test_without_protection_the_kernel_knows_a_loopback_address_only(
    opener: str, host: str
) -> None:
    async with OPENERS[opener](f"tcp://{host}:0"):
        hosts = listening_hosts()
        assert len(hosts) == 1, hosts
        (host,) = hosts
        assert ipaddress.ip_address(host).is_loopback
    assert listening_hosts() == []


@on_linux
@pytest.mark.refusal
@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("url", ["tcp://0.0.0.0:0", "tcp://[::]:0"])
async def test_what_is_refused_was_listened_at_for_no_moment(
    opener: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    binds: list[object] = []
    monkeypatch.setattr(socket.socket, "bind", lambda _, place: binds.append(place))
    with pytest.raises(asynckv.ConfigError, match="beyond this host"):
        async with OPENERS[opener](url):
            raise AssertionError
    assert binds == listening_hosts() == []


@on_linux
@pytest.mark.refusal
async def test_ranks_of_a_group_on_one_host_listen_at_loopback_only() -> None:
    async with open_group(2):
        hosts = listening_hosts()
    assert hosts and all(ipaddress.ip_address(host).is_loopback for host in hosts)


ELSEWHERE: Final = "tcp://192.0.2.7:7"
_EVENTS: Final = {"socket.connect", "socket.getaddrinfo", "socket.sendto"}
_watched: Final[list[list[tuple[str, Any]]]] = []


def _receive(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        for heard in _watched:
            heard.append((event, arguments))


@pytest.fixture(scope="module", autouse=True)
def audited() -> None:
    sys.addaudithook(_receive)  # it stays, and hears nothing unless it is told to


@contextlib.contextmanager
def watching() -> Iterator[list[tuple[str, Any]]]:
    """Whatever this process looks up or connects to."""
    heard: list[tuple[str, Any]] = []
    _watched.append(heard)
    try:
        yield heard
    finally:
        _watched.remove(heard)


def urls_in_it(kind: type[msgspec.Struct]) -> OpeningFrame:
    """A request with an address wherever there is room for one."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        text = str(field.type)
        if "tuple" in text:
            values[field.name] = (ELSEWHERE,)
        elif "TensorSpec" in text:
            values[field.name] = TensorSpec((1,), "uint8")
        elif "Literal" in text:
            values[field.name] = get_args(field.type)[0]
        elif "str" in text:
            values[field.name] = ELSEWHERE
        elif "bytes" in text:
            values[field.name] = b""
        elif field.required:
            values[field.name] = field.type is bool or 1
    return msgspec.convert(values, kind)  # type: ignore[return-value]


async def ask_everything(url: str) -> None:
    """Make every request, each on a link of its own."""
    for kind in get_args(OpeningFrame):
        link = await dial(url, identity=name_of("near"), lanes=1)
        with contextlib.suppress(asynckv.PeerLost):
            link.open_stream(Hearer(), urls_in_it(kind), ELSEWHERE.encode())
            last = Hearer()
            link.open_stream(last, Peek(has_key=False))
            await last.next()  # it is answered behind what was asked before
        await link.aclose()


@pytest.mark.both_loops
def test_every_request_can_be_made() -> None:
    named = [kind for kind in get_args(OpeningFrame) if kind.__name__ == "OpenPipe"]
    assert urls_in_it(named[0]).name == ELSEWHERE  # type: ignore[union-attr]


@pytest.mark.both_loops
@pytest.mark.refusal
def test_no_request_has_a_place_for_an_address() -> None:
    for kind in get_args(OpeningFrame):
        names = {field.name for field in msgspec.structs.fields(kind)}
        assert not names & {"url", "urls", "host", "address", "path"}, kind


@pytest.mark.both_loops
@pytest.mark.refusal
async def test_no_request_makes_a_server_dial() -> None:
    async with (
        asynckv.LookupBuffer("1MiB", drain_s=0) as lookup,
        asynckv.StoreBuffer("1MiB") as store,
        asynckv.serve("tcp://:0", lookup=lookup, store=store) as server,
    ):
        with watching() as heard:
            await ask_everything(server.url)
    port = int(server.url.rpartition(":")[2])
    assert heard
    assert {arguments[1] for _, arguments in heard} == {("127.0.0.1", port)}


@pytest.mark.both_loops
@pytest.mark.refusal
async def test_no_request_makes_a_listener_for_pipes_dial() -> None:
    async with asynckv.listen_pipe("tcp://:0") as listener:
        with watching() as heard:
            await ask_everything(listener.url)
        port = int(listener.url.rpartition(":")[2])
    assert {arguments[1] for _, arguments in heard} == {("127.0.0.1", port)}


@pytest.mark.both_loops
async def test_the_watch_would_see_it() -> None:
    with watching() as heard, contextlib.suppress(asynckv.AsyncKVError):
        await dial("tcp://127.0.0.1:1", identity=name_of("near"))
    assert [arguments[1] for _, arguments in heard] == [("127.0.0.1", 1)]

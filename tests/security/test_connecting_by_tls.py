"""Who gets in, over real sockets: with a certificate that the other side trusts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asynckv
from asynckv.errors import AuthError, ConfigError, PeerLost, ProtocolError
from asynckv.links.address import parse_url
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.links.listen import LinkListener, listen
from asynckv.links.options import keys_of, make_keyring
from asynckv.links.sockets import (
    assurance_of,
    bind,
    connect,
    converse,
    in_thread,
    read_first_frame,
    secure,
    send_first_frame,
)
from asynckv.protocol.frames import Refuse
from asynckv.protocol.handshake import Terms
from asynckv.protocol.hello import DialSide
from asynckv.protocol.values import PeerIdentity
from asynckv.security.keyring import Keyring
from asynckv.security.shared_secret import new_nonce
from asynckv.security.tls import ALPN, TLS
from asynckv.security.tls_socket import TlsSocket
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.certificates import Authority
from asynckv.testing.pairs import open_group, open_peers, open_pipe_pair
from harness.link_pairs import ScriptedService, linked, name_of

pytestmark = pytest.mark.both_loops

LARGE = torch.arange(3_000_000, dtype=torch.float32)
YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
Make = Callable[..., Path]


def keyring_of(tls: TLS, **changes: Any) -> Keyring:
    return Keyring(tls=dataclasses.replace(tls, **changes))


@contextlib.asynccontextmanager
async def listening(keyring: Keyring) -> AsyncIterator[LinkListener]:
    listener = await listen(
        "tls://:0",
        identity=PeerIdentity("far", "1"),
        service_for=lambda link: ScriptedService(),
        keyring=keyring,
        lanes=2,
    )
    try:
        yield listener
        await until(lambda: listener.links == ())
    finally:
        await listener.aclose()


async def refused(far: TLS, near: TLS, **options: Any) -> AuthError:
    """How one that dials learns that it is refused, or refuses itself."""
    async with listening(keyring_of(far)) as listener:
        with pytest.raises(AuthError) as caught:
            options = {"identity": name_of("near"), **options}
            await dial(listener.url, keyring=keyring_of(near), timeout_s=5, **options)
        assert listener.links == ()
    return caught.value


@pytest.mark.parametrize("with_secret", [False, True])
async def test_buffers_are_served_to_those_with_a_certificate(
    authority: Authority, make_secret: Make, with_secret: bool
) -> None:
    options: dict[str, Any] = {"tls": authority.issue()}
    if with_secret:
        options["secret_file"] = make_secret()
    async with (
        asynckv.LookupBuffer("32MiB") as buffer,
        open_peers("tls", buffer, **options) as peers,
    ):
        await peers.producer.lookup.insert([1, 2], None, LARGE, None, None)
        entry = await peers.consumer.lookup.drop_select([1, 2])
        assert isinstance(entry.key, torch.Tensor)
        assert torch.equal(entry.key, LARGE)


async def test_a_pipe_carries_tensors_both_ways_at_once(authority: Authority) -> None:
    async with open_pipe_pair("tls", tls=authority.issue(), lanes=1) as (near, far):
        for _ in range(3):
            *_, there, here = await asyncio.gather(
                near.send_tensor(LARGE),
                far.send_tensor(LARGE),
                far.recv_tensor(),
                near.recv_tensor(),
            )
            assert isinstance(there, torch.Tensor)
            assert isinstance(here, torch.Tensor)
            assert torch.equal(there, LARGE)
            assert torch.equal(here, LARGE)


async def test_a_group_meets_over_tls(authority: Authority) -> None:
    async with open_group(3, tls=authority.issue()) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        await groups[0].next_pipe.send_tensor(LARGE)
        received = await groups[1].prev_pipe.recv_tensor()
        assert received is not None
        assert torch.equal(received, LARGE)


async def test_a_node_takes_its_certificates_from_its_configuration(
    authority: Authority,
) -> None:
    tls = authority.issue()
    files = {"certificate": str(tls.certificate), "key": str(tls.key)}
    config = asynckv.KVTransferConfig(
        kv_role="kv_producer",
        kv_port=0,
        kv_connector_extra_config={"tls": {**files, "ca": str(tls.ca)}},
    )
    async with asynckv.open(config) as node:
        assert node.url.startswith("tls://127.0.0.1:")
        async with asynckv.connect(node.url, tls=tls) as peer:
            assert peer.is_connected


async def test_peers_are_called_what_their_certificates_say(
    authority: Authority,
) -> None:
    far = {"keyring": keyring_of(authority.issue("127.0.0.1", "server"))}
    near = {"keyring": keyring_of(authority.issue("worker-1"))}
    async with linked("tls://:0", far=far, near=near) as pair:
        assert pair.near.peer.id.endswith("@127.0.0.1")
        assert pair.far.peer.id.endswith("@worker-1")
        assert pair.far.peer.id.startswith("near-")


async def test_a_peer_does_not_end_the_link_of_another_of_that_name(
    authority: Authority,
) -> None:
    identity = PeerIdentity("engine", "1")
    async with listening(keyring_of(authority.issue())) as listener:
        links = [
            await dial(
                listener.url,
                identity=identity,
                keyring=keyring_of(authority.issue(name)),
                lanes=1,
            )
            for name in ("worker-1", "worker-2")
        ]
        assert {link.peer.id for link in listener.links} == {
            "engine@worker-1",
            "engine@worker-2",
        }
        for link in links:
            await link.aclose()


@pytest.mark.refusal
async def test_a_name_that_the_certificate_does_not_prove_is_refused(
    authority: Authority,
) -> None:
    error = await refused(
        authority.issue(),
        authority.issue("worker-1"),
        identity=PeerIdentity("engine@worker-2", "1"),
    )
    assert "not in its certificate" in str(error)


@pytest.mark.refusal
async def test_another_authority_is_refused_by_either_side(
    authority: Authority, stranger_authority: Authority
) -> None:
    known = authority.issue()
    unknown = stranger_authority.issue(ca=authority.path)
    error = await refused(far=known, near=unknown)
    assert "refuses our certificate" in str(error)
    error = await refused(far=unknown, near=known)
    assert "certificate is refused: unable to get local issuer" in str(error)


@pytest.mark.refusal
async def test_a_certificate_that_is_out_of_date_is_refused_by_either_side(
    authority: Authority,
) -> None:
    good = authority.issue()
    expired = authority.issue(not_after=YESTERDAY)
    assert "refuses our certificate" in str(await refused(good, expired))
    assert "certificate has expired" in str(await refused(expired, good))


@pytest.mark.refusal
async def test_a_server_of_another_name_is_refused(authority: Authority) -> None:
    near, far = authority.issue(), authority.issue("kv.example")
    assert "IP address mismatch" in str(await refused(far, near))
    other = dataclasses.replace(near, server_name="other.example")
    assert "Hostname mismatch" in str(await refused(far, other))
    fitting = keyring_of(near, server_name="kv.example")
    async with listening(keyring_of(far)) as listener:
        link = await dial(listener.url, identity=name_of("near"), keyring=fitting)
        await link.aclose()


@pytest.mark.refusal
async def test_a_peer_that_is_not_allowed_is_refused_by_either_side(
    authority: Authority,
) -> None:
    near, far = authority.issue("worker-1"), authority.issue("127.0.0.1", "server")
    choosy = dataclasses.replace(far, allowed_peers=("worker-2", "worker-3"))
    assert "not that of an allowed peer" in str(await refused(choosy, near))
    choosy = dataclasses.replace(near, allowed_peers=("another-server",))
    assert "not that of an allowed peer" in str(await refused(far, choosy))
    async with listening(keyring_of(far, allowed_peers=("worker-1",))) as listener:
        keyring = keyring_of(near, allowed_peers=("server",))
        link = await dial(listener.url, identity=name_of("near"), keyring=keyring)
        await link.aclose()


@pytest.mark.parametrize("ours", [True, False])
async def test_a_certificate_is_not_enough_where_a_secret_is_asked_for(
    authority: Authority, make_secret: Make, ours: bool
) -> None:
    with_secret = make_keyring(make_secret(), authority.issue(), False, {})
    without = make_keyring(None, authority.issue(), False, {})
    far, near = (without, with_secret) if ours else (with_secret, without)
    async with listening(far) as listener:
        with pytest.raises(AuthError, match="no proof of a shared secret"):
            await dial(listener.url, identity=name_of("near"), keyring=near)


def context_of(tls: TLS, *, certified: bool = True) -> ssl.SSLContext:
    """What somebody uses who is no asynckv."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls.ca)
    context.set_alpn_protocols([ALPN])
    if certified:
        context.load_cert_chain(tls.certificate)
    return context


async def connected(url: str, context: ssl.SSLContext) -> bytes:
    """What a listener says to a foreign client, after its own handshake."""

    def talk(port: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as sock,
        ):
            return sock.recv(1000)

    return await in_thread(lambda: talk(parse_url(url).port))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("certified", "version", "because"),
    [
        (False, ssl.TLSVersion.TLSv1_3, "CERTIFICATE_REQUIRED"),
        (True, ssl.TLSVersion.TLSv1_2, "PROTOCOL_VERSION"),
    ],
    ids=["no certificate", "TLS 1.2"],
)
async def test_a_client_that_proves_too_little_is_refused(
    authority: Authority, certified: bool, version: ssl.TLSVersion, because: str
) -> None:
    async with listening(keyring_of(authority.issue())) as listener:
        context = await in_thread(
            lambda: context_of(authority.issue(), certified=certified)
        )
        context.maximum_version = version
        with pytest.raises(ssl.SSLError, match=because):
            await connected(listener.url, context)


@pytest.mark.refusal
async def test_another_protocol_over_tls_is_refused(authority: Authority) -> None:
    async with listening(keyring_of(authority.issue())) as listener:
        context = await in_thread(lambda: context_of(authority.issue()))
        context.set_alpn_protocols(["h2"])
        assert b"no asynckv" in await connected(listener.url, context)


@contextlib.asynccontextmanager
async def impostor(serve: Callable[[socket.socket], object]) -> AsyncIterator[int]:
    """Somebody who takes one connection, in a thread."""
    with await bind(parse_url("tcp://:0")) as listener:
        listener.settimeout(10)

        def run() -> None:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                with sock:
                    sock.settimeout(10)
                    serve(sock)

        task = asyncio.create_task(in_thread(run))
        yield listener.getsockname()[1]
        await task


def shake_hands(context: ssl.SSLContext, sock: socket.socket) -> None:
    context.wrap_socket(sock, server_side=True).close()


async def check_refused(tls: TLS, context: ssl.SSLContext, because: str) -> None:
    """Dial a server that shakes hands as ``context`` says, with our certificate."""
    await in_thread(lambda: context.load_cert_chain(tls.certificate))
    async with impostor(lambda sock: shake_hands(context, sock)) as port:
        with pytest.raises(AuthError, match=because):
            await dial(
                f"tls://localhost:{port}",
                identity=name_of("near"),
                keyring=keyring_of(tls),
            )


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("version", "because"),
    [
        (ssl.TLSVersion.TLSv1_2, "no version of TLS in common"),
        (ssl.TLSVersion.TLSv1_3, "is no asynckv"),
    ],
    ids=["TLS 1.2", "no asynckv"],
)
async def test_a_server_that_is_not_one_of_ours_is_refused(
    authority: Authority, version: ssl.TLSVersion, because: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = version
    await check_refused(authority.issue(), context, because)


@pytest.mark.refusal
async def test_plaintext_to_a_tls_port_is_refused(authority: Authority) -> None:
    async with listening(keyring_of(authority.issue())) as listener:
        url = listener.url.replace("tls://", "tcp://")
        for _ in range(3):
            with pytest.raises((ProtocolError, PeerLost), match="TLS|hung up|broke"):
                await dial(url, identity=name_of("near"))
        assert listener.links == ()


@pytest.mark.refusal
async def test_tls_to_a_plaintext_port_is_refused(authority: Authority) -> None:
    async with asynckv.listen_pipe("tcp://:0") as listener:
        url = listener.url.replace("tcp://", "tls://")
        for _ in range(3):
            with pytest.raises(AuthError, match="does not speak TLS"):
                await dial(
                    url,
                    identity=name_of("near"),
                    keyring=keyring_of(authority.issue()),
                )


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_tls_handshake_that_takes_too_long_is_hung_up_on(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr("asynckv.links.acceptor._GREETING_S", 0.1)
    async with listening(keyring_of(authority.issue())) as listener:
        with await connect(parse_url(listener.url)) as sock:
            await send_first_frame(sock, said)
            with pytest.raises(PeerLost, match="hung up"):
                await read_first_frame(sock)


async def test_silent_strangers_keep_nobody_out(authority: Authority) -> None:
    keyring = keyring_of(authority.issue())
    async with listening(keyring) as listener, contextlib.AsyncExitStack() as stack:
        for _ in range(80):
            stack.enter_context(await connect(parse_url(listener.url)))
        link = await dial(listener.url, identity=name_of("near"), keyring=keyring)
        await link.aclose()


async def over_tls(url: str, tls: TLS) -> TlsSocket:
    keys = (await keys_of(keyring_of(tls))).tls
    assert keys is not None
    plain = await connect(parse_url(url))
    sock = TlsSocket.over(plain, keys, dials="localhost")
    await secure(sock, keys)
    return sock


async def test_a_lane_comes_from_the_very_peer_that_opened_the_link(
    authority: Authority,
) -> None:
    mine, other = authority.issue("worker-1"), authority.issue("worker-2")
    terms = Terms(identity=name_of("near"), payload_paths=("inline",), lanes=2)
    async with listening(keyring_of(authority.issue())) as listener:
        with await over_tls(listener.url, mine) as control:
            side = DialSide(terms, nonce=new_nonce(), assurance=assurance_of(control))
            await send_first_frame(control, side.hello)
            await converse(control, side)
            attach = side.outcome().attach(0)
            with await over_tls(listener.url, other) as thief:
                await send_first_frame(thief, attach)
                assert isinstance(await read_first_frame(thief), Refuse)
            with await over_tls(listener.url, mine) as lane:
                await send_first_frame(lane, attach)
                side.outcome().check_attached(0, await read_first_frame(lane))


@pytest.mark.refusal
async def test_what_was_said_over_one_connection_proves_nothing_over_another(
    authority: Authority, make_secret: Make
) -> None:
    far = make_keyring(make_secret(), authority.issue(), False, {})
    keys = await keys_of(far)
    terms = Terms(identity=name_of("near"), payload_paths=("inline",))
    async with listening(far) as listener:
        with (
            await over_tls(listener.url, authority.issue("a")) as one,
            await over_tls(listener.url, authority.issue("b")) as two,
        ):
            side = DialSide(
                terms,
                keys.first_secret,
                nonce=new_nonce(),
                assurance=assurance_of(one),
            )
            await send_first_frame(two, side.hello)
            with pytest.raises(AuthError):
                await converse(two, side)


async def test_dialling_over_tls_is_cancelled_at_every_suspension(
    authority: Authority, make_secret: Make
) -> None:
    path = make_secret()
    far, near = (make_keyring(path, authority.issue(), False, {}) for _ in range(2))

    async def close(k: int, mode: CancelMode, outcome: Outcome[Link]) -> None:
        if outcome.value is not None:
            await outcome.value.aclose()

    async with listening(far) as listener:
        counts = await sweep_cancellation(
            lambda: dial(listener.url, identity=name_of("near"), keyring=near, lanes=2),
            close,
            modes=("task", "scope", "completion"),
        )
    assert counts.cancelled > 10


async def test_certificates_are_exchanged_while_links_stay_up(
    authority: Authority, stranger_authority: Authority, tmp_path: Path
) -> None:
    old, new = authority.issue(), stranger_authority.issue()
    tls = TLS(certificate=tmp_path / "own", key=tmp_path / "own", ca=tmp_path / "ca")

    def use(source: TLS) -> None:
        (tmp_path / "own").touch(0o600)
        (tmp_path / "own").write_bytes(Path(source.certificate).read_bytes())
        (tmp_path / "ca").write_bytes(Path(source.ca).read_bytes())

    await in_thread(lambda: use(old))
    far = keyring_of(tls)
    near = {"keyring": keyring_of(old)}
    async with linked("tls://:0", far={"keyring": far}, near=near) as pair:
        await in_thread(lambda: use(new))
        far._checked_at = 0.0
        url = pair.listener.url
        link = await dial(url, identity=name_of("new"), keyring=keyring_of(new))
        await link.aclose()
        assert pair.near.is_open


async def test_certificates_and_addresses_belong_together(
    authority: Authority,
) -> None:
    tls = authority.issue()
    for url in ("tcp://:0", "unix:///tmp/x.sock", "mem://"):
        with pytest.raises(ConfigError, match="is no TLS"):
            async with asynckv.listen_pipe(url, tls=tls):
                pass
    with pytest.raises(ConfigError, match="needs certificates"):
        async with asynckv.listen_pipe("tls://:0"):
            pass


async def test_with_certificates_other_machines_may_be_reached(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with asynckv.listen_pipe("tls://0.0.0.0:0", tls=authority.issue()):
        pass
    assert "plaintext" not in caplog.text


async def test_bytes_that_are_changed_on_the_way_end_the_link(
    authority: Authority,
) -> None:
    keyring = keyring_of(authority.issue())
    options = {"keyring": keyring, "lanes": 1}
    async with linked("tls://:0", near=options, far=options) as pair:
        raw: ssl.SSLSocket = pair.far._stream._sock._sock  # type: ignore[attr-defined]
        socket.socket.send(raw, b"\x17\x03\x03\x00\x20" + bytes(32))
        await until(lambda: not pair.near.is_open)
        assert "broke" in str(pair.near.error)


async def test_localhost_may_be_what_a_certificate_is_for(authority: Authority) -> None:
    async with listening(keyring_of(authority.issue("localhost"))) as listener:
        link = await dial(
            listener.url.replace("127.0.0.1", "localhost"),
            identity=name_of("near"),
            keyring=keyring_of(authority.issue()),
        )
        await link.aclose()

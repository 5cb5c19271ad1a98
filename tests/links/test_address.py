from __future__ import annotations

import logging
import os
import secrets
import traceback
from pathlib import Path
from typing import Any

import pytest

from asynckv.abc import PayloadTransport
from asynckv.errors import ConfigError
from asynckv.links.address import (
    Address,
    check_exposure,
    host_in,
    is_beyond_this_host,
    parse_url,
)
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.options import (
    TRANSPORTS,
    as_lanes,
    device_digest,
    keys_of,
    make_keyring,
    new_identity,
    payload_digest,
    payload_paths,
)
from asynckv.security.keyring import NO_KEYS, Keyring, Keys
from asynckv.security.shared_secret import Secret
from asynckv.security.tls import TLS
from asynckv.testing.certificates import Authority
from harness.inline_ends import Landing
from harness.link_pairs import linked


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("tcp://10.0.0.1:7000", Address("tcp", host="10.0.0.1", port=7000)),
        ("tcp://:0", Address("tcp", host="127.0.0.1")),
        ("tcp://localhost:1", Address("tcp", host="127.0.0.1", port=1)),
        ("tls://kv.example:1", Address("tls", host="kv.example", port=1)),
        (
            "tls://localhost:1",
            Address("tls", host="127.0.0.1", port=1, name="localhost"),
        ),
        ("tcp://[::1]:7000/", Address("tcp", host="::1", port=7000)),
        ("unix:///run/a%20b.sock", Address("unix", place="/run/a b.sock")),
        ("mem://name", Address("mem", place="name")),
        ("mem://", Address("mem")),
        ("mem://a%2520b", Address("mem", place="a%20b")),
        ("TCP://h:1", Address("tcp", host="h", port=1)),
        (
            "tcp://h:1?payload=inline",
            Address("tcp", host="h", port=1, payload="inline"),
        ),
    ],
)
def test_a_url_says_where_a_peer_is(url: str, address: Address) -> None:
    assert parse_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "tcp://127.0.0.1",
        "tcp://host:70000",
        "tcp://host:x",
        "tcp://host:1/path",
        "tcp://user@host:1",
        "tls://user@host:1",
        "tls://host:1/path",
        "tls://host",
        "tcp://host:1#part",
        "tcp://host:1?lanes=3",
        "unix://relative/path",
        "unix:",
        "unix:///nul%00",
        "unix:///" + "x" * 120,
        "http://host:1",
        "host:1",
        "",
        "tcp://[::1:1",
        "tcp://127.0.0.1:70\n00",
        "mem:name",
        "mem:@",
        "unix:/a/b",
        "unix:///\ud800",
        "tcp://a..b:7000",
        "tls://.x:1",
        "tcp://\u00e4..:0",
        f"tcp://{'a' * 64}:1",
        "tcp://[fe80::1%eth0]:1",
    ],
)
def test_what_is_no_address_says_so(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "tcp://127.0.0.1:7000",
        "tcp://[::1]:7",
        "tls://host:1",
        "unix:///a/b",
        "unix:///a%20b%3Fc%25",
        "unix:///%FF",
        "mem://name",
        "mem://a%23b/c",
    ],
)
def test_an_address_is_written_as_it_was_read(url: str) -> None:
    assert str(parse_url(url)) == url


@pytest.mark.parametrize(
    ("name", "host"),
    [
        (("10.0.0.2", 7000), "10.0.0.2"),
        (("::1", 7000, 0, 0), "::1"),
        (("::ffff:10.0.0.2", 7000, 0, 0), "10.0.0.2"),
        ("/run/asynckv.sock", ""),
        (b"\0abstract", ""),
    ],
)
def test_what_a_socket_says_of_an_end_has_a_host(name: object, host: str) -> None:
    assert host_in(name) == host


def test_an_option_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_url("tcp://127.0.0.1:1?payload=inline&payload=map")


@pytest.mark.parametrize("password", ["hunter", "hun/ter", "hun?ter", "hun#ter"])
def test_a_password_that_does_not_belong_there_is_not_shown(password: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_url(f"redis://me:{password}@host:6379")
    assert "hun" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_what_is_no_text_is_no_url() -> None:
    with pytest.raises(TypeError, match="a URL is a str, not None"):
        parse_url(None)  # type: ignore[arg-type]


HERE = [
    "tcp://:0",
    "tcp://127.0.0.1:1",
    "tcp://127.1.2.3:1",
    "tcp://[::1]:1",
    "tcp://[::ffff:127.0.0.1]:1",
    "tcp://localhost:1",
    "unix:///run/asynckv.sock",
    "mem://name",
]
ELSEWHERE = [
    "tcp://0.0.0.0:0",
    "tcp://[::]:0",
    "tcp://10.0.0.2:1",
    "tcp://[fe80::1]:1",
    "tcp://[::ffff:10.0.0.2]:1",
    "tcp://localhost.example:1",
    "tcp://prefill-0:1",
]
CERTIFICATES = TLS(certificate="own.pem", key="own.pem", ca="ca.pem")
SECRETS = (Secret(b"secret" * 8),)


@pytest.mark.parametrize("url", HERE)
def test_this_host_asks_for_nothing(url: str) -> None:
    assert not is_beyond_this_host(parse_url(url))
    check_exposure(parse_url(url), NO_KEYS)


@pytest.mark.parametrize("url", ELSEWHERE)
def test_beyond_it_authentication_is_asked_for(url: str) -> None:
    assert is_beyond_this_host(parse_url(url))
    for keyring in (NO_KEYS, Keyring(allow_plaintext=True)):
        with pytest.raises(ConfigError, match="prove who it is") as caught:
            check_exposure(parse_url(url), keyring)
        assert "secret_file" in caught.value.hint


@pytest.mark.parametrize("url", ELSEWHERE)
def test_plaintext_has_to_be_allowed(url: str) -> None:
    with pytest.raises(ConfigError, match="in the clear.*allow_plaintext=True"):
        check_exposure(parse_url(url), Keyring(secrets=SECRETS))


def test_plaintext_that_is_allowed_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keyring = Keyring(secrets=SECRETS, allow_plaintext=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check_exposure(parse_url("tcp://10.0.0.2:1"), keyring)
    assert len(caplog.records) == 1
    assert "tcp://10.0.0.2:1" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "kv.example"])
def test_tls_asks_for_nothing_else(host: str, caplog: pytest.LogCaptureFixture) -> None:
    check_exposure(parse_url(f"tls://{host}:1"), Keyring(tls=CERTIFICATES))
    assert not caplog.records


@pytest.mark.parametrize("url", [*HERE, *ELSEWHERE])
def test_certificates_are_never_left_unused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no TLS"):
        check_exposure(parse_url(url), Keyring(tls=CERTIFICATES, allow_plaintext=True))


def test_tls_needs_certificates() -> None:
    with pytest.raises(ConfigError, match="needs certificates"):
        check_exposure(parse_url("tls://:1"), Keyring(secrets=SECRETS))


def test_each_identity_is_another_incarnation() -> None:
    first, second = new_identity("node"), new_identity("node")
    assert first.id == second.id == "node"
    assert first.incarnation != second.incarnation


def test_without_a_name_each_identity_has_one_of_its_own() -> None:
    assert new_identity().id != new_identity().id
    assert new_identity(role="producer").role == "producer"
    assert new_identity().pid == os.getpid()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"identity": 5}, "identity=5 .*one line"),
        ({"identity": 0}, "identity=0"),
        ({"identity": 2**70}, "identity=1180"),
        ({"identity": b"x"}, "identity=b'x'"),
        ({"identity": "a\nb"}, "one line"),
        ({"identity": "\ud800"}, "one line"),
        ({"identity": "x" * 300}, "at most 256 characters"),
        ({"role": "foo"}, "role='foo' .*'producer', 'consumer', 'both'"),
        ({"role": None}, "role=None"),
    ],
)
def test_a_name_or_a_role_that_no_peer_could_read_is_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        new_identity(**options)


@pytest.mark.parametrize("digest", ["foo", None, []])
def test_a_digest_that_nobody_knows_is_refused(digest: Any) -> None:
    with pytest.raises(ConfigError, match="one of 'auto', 'full', 'edges', 'off'"):
        payload_digest(digest)


@pytest.mark.parametrize("lanes", [0, 9, 2.5, "2", True])
def test_no_link_has_such_a_number_of_lanes(lanes: Any) -> None:
    with pytest.raises(ConfigError, match="a link has 1 to 8"):
        as_lanes(lanes)


def test_what_crosses_a_socket_is_digested_unless_that_is_off() -> None:
    assert payload_digest("auto") == payload_digest("edges") == "full"
    assert payload_digest("full") == "full"
    assert device_digest("auto") == "full" and device_digest("edges") == "edges"
    assert payload_digest("off") == "off"


def test_the_secret_is_the_given_file_or_the_environments() -> None:
    text = "correct-horse-battery-staple-0123"
    in_place, elsewhere = {"ASYNCKV_SECRET": text}, {"ASYNCKV_SECRET_FILE": "/b"}
    assert not make_keyring(None, None, False, {}).has_secret
    for environ in ({}, in_place, elsewhere):
        keyring = make_keyring(Path("/a"), None, False, environ)
        with pytest.raises(ConfigError, match="/a cannot be read"):
            keyring.current()
    assert len(make_keyring(None, None, False, in_place).current().secrets) == 1
    with pytest.raises(ConfigError, match="/b cannot be read"):
        make_keyring(None, None, False, elsewhere).current()


def test_the_process_s_own_environment_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASYNCKV_SECRET", "short")
    with pytest.raises(ConfigError, match="ASYNCKV_SECRET holds a secret of less"):
        make_keyring(None, None, False)


@pytest.mark.parametrize("also_a_file", [False, True])
def test_no_traceback_shows_the_environment(
    monkeypatch: pytest.MonkeyPatch, also_a_file: bool
) -> None:
    text = "correct-horse-battery-staple"
    monkeypatch.setenv("ASYNCKV_SECRET", text)
    if also_a_file:
        monkeypatch.setenv("ASYNCKV_SECRET_FILE", "/run/secret")
    with pytest.raises(ConfigError) as caught:
        make_keyring(None, None, False)
    shown = traceback.TracebackException.from_exception(
        caught.value, capture_locals=True
    )
    shown.stack.pop(0)  # this test
    assert text not in "".join(shown.format())


def test_certificates_are_given_by_their_files(authority: Authority) -> None:
    keyring = make_keyring(None, authority.issue(), False, {})
    assert keyring.has_tls
    assert keyring.current().tls is not None
    with pytest.raises(ConfigError, match="tls is a str"):
        make_keyring(None, "ca.pem", False, {})  # type: ignore[arg-type]


def test_plaintext_is_allowed_explicitly() -> None:
    assert make_keyring(None, None, True, {}).allow_plaintext
    assert not make_keyring(None, None, False, {}).allow_plaintext


def test_an_identity_tells_which_machine_and_since_which_start() -> None:
    first, second = new_identity(), new_identity()
    assert first.host_id == second.host_id != ""
    assert first.boot_id == second.boot_id
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    assert first.boot_id == (boot_id.read_text().strip() if boot_id.exists() else "")


@pytest.mark.both_loops
async def test_no_keys_take_no_thread() -> None:
    assert await keys_of(NO_KEYS) == Keys()


@pytest.mark.both_loops
async def test_files_are_read_off_the_loop(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    keyring = Keyring(secret_file=str(path))
    with pytest.raises(ConfigError, match="holds 0 secrets"):
        await keys_of(keyring)
    path.write_text(secrets.token_hex(32))
    keys = await keys_of(keyring)
    assert keys.first_secret is not None
    assert await keys_of(keyring) is keys


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_stands_under_its_own_name(name: str) -> None:
    assert issubclass(TRANSPORTS[name], PayloadTransport)
    assert TRANSPORTS[name].name == name


NEEDS_FILES = pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")


@pytest.mark.parametrize(
    ("url", "paths"),
    [
        ("tcp://:1?payload=inline", ("inline",)),
        ("mem://x", ("mem", "inline")),
        ("mem://x?payload=inline", ("inline",)),
        *(
            pytest.param(url, paths, marks=NEEDS_FILES)
            for scheme in ("tcp://:1", "tls://:1", "unix:///x")
            for url, paths in (
                (scheme, ("map", "inline")),
                (f"{scheme}?payload=map", ("map",)),
            )
        ),
    ],
)
def test_each_url_has_its_payload_paths(url: str, paths: tuple[str, ...]) -> None:
    assert payload_paths(parse_url(url)) == paths


def test_one_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="possible: .*inline"):
        payload_paths(parse_url("tcp://:1?payload=nccl"))


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("url", "name"),
    [("tcp://:0", "inline"), ("mem://", "mem"), ("mem://?payload=inline", "inline")],
)
async def test_a_payload_crosses_a_link_by_what_was_agreed_on(
    url: str, name: str
) -> None:
    async with linked(url, far={"lanes": 2}) as pair:
        assert pair.near.transport_name == pair.far.transport_name == name
        assert pair.near.payload.name == name
        source, target = bytes(range(256)) * 4096, bytearray(256 * 4096)
        transfer, landed, sent = pair.near.new_transfer(), Landing(), Landing()
        pair.far.payload.receive(transfer, 0, memoryview(target), landed)
        pair.near.payload.send(transfer, 0, memoryview(source), sent)
        assert await landed == await sent
        assert target == source

from __future__ import annotations

import logging

import pytest

from asynckv.errors import ConfigError
from asynckv.links.address import (
    Address,
    check_exposure,
    host_in,
    is_beyond_this_host,
    parse_url,
)
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.security.shared_secret import Secret
from asynckv.security.tls import TLS


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

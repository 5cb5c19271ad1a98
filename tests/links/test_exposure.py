from __future__ import annotations

import logging

import pytest

from asynckv.errors import ConfigError
from asynckv.links.address import check_exposure, is_beyond_this_host, parse_url
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.security.shared_secret import Secret
from asynckv.security.tls import TLS

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

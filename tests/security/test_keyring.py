from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from asynckv.errors import ConfigError
from asynckv.security.keyring import NO_KEYS, Keyring, Keys
from asynckv.security.shared_secret import Secret


def mac_of(keys: Keys) -> bytes:
    assert keys.first_secret is not None
    return keys.first_secret.sign(b"message")


def test_without_keys_nothing_is_read() -> None:
    assert NO_KEYS.fresh() == NO_KEYS.current() == Keys()
    assert Keys().first_secret is None
    assert not NO_KEYS.has_secret
    assert repr(NO_KEYS) == "<Keyring of no keys>"


def test_secrets_that_were_given_are_there_at_once() -> None:
    secret = Secret(secrets.token_bytes(32))
    keyring = Keyring(secrets=(secret,))
    assert keyring.has_secret
    assert repr(keyring) == "<Keyring of a secret>"
    assert keyring.fresh() == keyring.current() == Keys((secret,))


def test_a_file_is_read_when_it_is_asked_for(make_secret: Callable[..., Path]) -> None:
    keyring = Keyring(secret_file=str(make_secret()))
    assert keyring.has_secret
    assert keyring.fresh() is None
    assert keyring.current() is keyring.current() is keyring.fresh()


def test_a_file_that_never_was_good_is_refused_each_time(
    make_secret: Callable[..., Path],
) -> None:
    path = make_secret("short")
    keyring = Keyring(secret_file=str(path))
    for _ in range(2):
        with pytest.raises(ConfigError, match="less than 32"):
            keyring.current()
    path.write_text(secrets.token_hex(32))
    assert keyring.current().first_secret is not None


def test_a_file_that_has_changed_is_read_again(
    make_secret: Callable[..., Path],
) -> None:
    path, other = make_secret(), make_secret()
    keyring = Keyring(secret_file=str(path))
    before = mac_of(keyring.current())
    other.rename(path)
    assert mac_of(keyring.current()) != before


def test_a_file_that_has_gone_bad_leaves_the_old_keys_in_use(
    make_secret: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = make_secret()
    keyring = Keyring(secret_file=str(path))
    before = mac_of(keyring.current())
    os.unlink(path)
    assert mac_of(keyring.current()) == mac_of(keyring.current()) == before
    assert caplog.text.count("the old stay") == 1
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    assert mac_of(keyring.current()) != before

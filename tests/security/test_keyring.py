from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from asynckv.errors import ConfigError
from asynckv.security.keyring import NO_KEYS, Keyring, Keys
from asynckv.security.private_files import check_private, read_private
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "private"
    file.write_bytes(b"contents")
    file.chmod(0o600)
    return file


def test_a_private_file_is_read(path: Path) -> None:
    check_private(str(path))
    assert read_private(str(path)) == b"contents"
    path.chmod(0o400)
    assert read_private(str(path)) == b"contents"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_a_file_that_others_can_touch_is_refused_with_what_to_do(
    path: Path, mode: int
) -> None:
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"its mode is 0{mode:o}") as caught:
        read_private(str(path))
    assert caught.value.hint == f"chmod 600 {path}"
    with pytest.raises(ConfigError):
        check_private(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused_also_by_root(path: Path) -> None:
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        read_private(str(path))


def test_no_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_private(str(tmp_path / "none"))


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="is no file"):
            read_private(str(path))


def test_a_link_is_judged_by_what_it_leads_to(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_private(str(link)) == b"contents"
    path.chmod(0o644)
    with pytest.raises(ConfigError):
        read_private(str(link))


def test_no_more_than_64_kib_are_read(path: Path) -> None:
    path.write_bytes(b"x" * 100_000)
    assert len(read_private(str(path))) == 64 * 1024

from __future__ import annotations

import copy
import pickle  # noqa: TID251 - to see it refused
import traceback
from pathlib import Path

import pytest

from asynckv.errors import ConfigError
from asynckv.security.shared_secret import (
    Secret,
    read_secrets,
    secret_file_from,
    secrets_from,
)

TEXT = "correct horse battery staple 0123".replace(" ", "-")
OTHER = TEXT[::-1]


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def shown_of(error: BaseException) -> str:
    """What a traceback with variables shows, but for those of the test itself."""
    shown = traceback.TracebackException.from_exception(error, capture_locals=True)
    return "".join(line for line in shown.format() if __file__ not in line)


def mac_of(text: str) -> bytes:
    return Secret(text.encode()).sign(b"message")


@pytest.mark.parametrize("text", [TEXT, f"{TEXT}\n", f"  \t{TEXT}\r\n\n"])
def test_a_secret_is_trimmed(tmp_path: Path, text: str) -> None:
    (secret,) = read_secrets(write(tmp_path, text))
    assert secret.sign(b"message") == mac_of(TEXT)


def test_a_file_holds_two_secrets_while_they_are_exchanged(tmp_path: Path) -> None:
    first, second = read_secrets(write(tmp_path, f"{TEXT}\n{OTHER}\n"))
    assert first.sign(b"message") == mac_of(TEXT)
    assert second.sign(b"message") == mac_of(OTHER)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds 0 secrets"),
        (f"{TEXT}\n{OTHER}\n{TEXT}", "holds 3 secrets"),
        (TEXT[:31], "less than 32 bytes"),
        (f"{TEXT} short", "less than 32 bytes"),
        ("a" * 64, "anybody could guess"),
        (TEXT + "\u00e9", "not ASCII"),
    ],
)
def test_what_is_no_secret_is_refused_with_how_to_make_one(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_secrets(path)
    assert path in str(caught.value)
    assert "openssl rand" in caught.value.hint
    with pytest.raises(ConfigError, match=f"ASYNCKV_SECRET .*{message}"):
        secrets_from({"ASYNCKV_SECRET": text})


def test_the_environment_holds_a_secret_or_the_path_of_one() -> None:
    assert secrets_from({}) == ()
    assert secret_file_from({}) is None
    (secret,) = secrets_from({"ASYNCKV_SECRET": TEXT})
    assert secret.sign(b"message") == mac_of(TEXT)
    assert secret_file_from({"ASYNCKV_SECRET_FILE": "/run/secret"}) == "/run/secret"


def test_two_places_at_once_are_refused() -> None:
    environ = {"ASYNCKV_SECRET": TEXT, "ASYNCKV_SECRET_FILE": "/run/secret"}
    with pytest.raises(ConfigError, match="both"):
        secret_file_from(environ)


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret(TEXT.encode())
    shown = f"{secret} {secret!r} {[secret]} {secret.derive(b'lanes')}"
    assert shown == "<Secret> <Secret> [<Secret>] <Secret>"
    for copies in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            copies(secret)


@pytest.mark.parametrize("text", [f"{TEXT} {TEXT} {TEXT}", f"{TEXT} short", TEXT + "é"])
def test_no_traceback_shows_a_secret(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_secrets(path)
    assert TEXT not in shown_of(caught.value)


@pytest.mark.parametrize("byte", ["\udcff", "\ud800"])
def test_an_environment_that_is_no_text_does_not_show_its_secret(byte: str) -> None:
    environ = {"ASYNCKV_SECRET": TEXT + byte}
    with pytest.raises(ConfigError, match="not ASCII") as caught:
        secrets_from(environ)
    assert caught.value.__context__ is None
    assert shown_of(caught.value).count(TEXT) == 0


def test_only_its_own_mac_is_its_own() -> None:
    secret = Secret(TEXT.encode())
    mac = secret.sign(b"message")
    assert len(mac) == 32
    assert secret.has_signed(b"message", mac)
    assert not secret.has_signed(b"massage", mac)
    assert not secret.has_signed(b"message", mac[:-1])
    assert not secret.has_signed(b"message", b"")
    assert not Secret(OTHER.encode()).has_signed(b"message", mac)
    assert not secret.derive(b"lanes").has_signed(b"message", mac)

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from asynckv.errors import ConfigError
from asynckv.links.options import (
    device_digest,
    make_keyring,
    new_identity,
    payload_digest,
)
from asynckv.testing.certificates import Authority


def test_each_identity_is_another_incarnation() -> None:
    first, second = new_identity("node"), new_identity("node")
    assert first.id == second.id == "node"
    assert first.incarnation != second.incarnation


def test_without_a_name_each_identity_has_one_of_its_own() -> None:
    assert new_identity().id != new_identity().id
    assert new_identity(role="producer").role == "producer"
    assert new_identity().pid == os.getpid()


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

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asynckv.errors import ConfigError
from asynckv.links.options import new_identity, payload_digest, refuse_security


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
    assert payload_digest("off") == "off"


def test_a_promise_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither authentication nor TLS"):
        refuse_security("secret", None, allow_plaintext=False)
    with pytest.raises(ConfigError, match="neither authentication nor TLS"):
        refuse_security(None, object(), allow_plaintext=False)
    refuse_security(None, None, allow_plaintext=True)


def test_an_identity_tells_which_machine_and_since_which_start() -> None:
    first, second = new_identity(), new_identity()
    assert first.host_id == second.host_id != ""
    assert first.boot_id == second.boot_id
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    assert first.boot_id == (boot_id.read_text().strip() if boot_id.exists() else "")

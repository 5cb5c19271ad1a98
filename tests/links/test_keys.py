from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from asynckv.errors import ConfigError
from asynckv.links.options import keys_of
from asynckv.security.keyring import NO_KEYS, Keyring, Keys

pytestmark = pytest.mark.both_loops


async def test_no_keys_take_no_thread() -> None:
    assert await keys_of(NO_KEYS) == Keys()


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

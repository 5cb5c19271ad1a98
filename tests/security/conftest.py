from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

SecretMaker = Callable[..., Path]


@pytest.fixture
def make_secret(tmp_path: Path) -> SecretMaker:
    """Write a file with as many new secrets as are not given."""

    def make(*given: str, mode: int = 0o600) -> Path:
        path = tmp_path / f"secret-{secrets.token_hex(4)}"
        path.touch(mode=mode)
        path.chmod(mode)
        path.write_text("\n".join(given or (secrets.token_hex(32),)) + "\n")
        return path

    return make

"""What tests of stores need of the machine."""

from __future__ import annotations

import shutil

import pytest

from harness.moto_server import moto, obstore_has_its_threads, s3
from harness.redis_servers import PROGRAM

__all__ = ("moto", "obstore_has_its_threads", "redis_program", "s3")


@pytest.fixture
def redis_program() -> None:
    """Skip a test where there is no server to start."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"there is no {PROGRAM} on the PATH: install Redis to run this")

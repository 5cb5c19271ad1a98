from __future__ import annotations

import asyncio

import pytest

from asynckv.testing.fuzzing.recording import Recording
from asynckv.testing.fuzzing.scenes import record


@pytest.fixture(scope="session")
def recording() -> Recording:
    """Return what two sides said who did everything there is to do."""
    return asyncio.run(record())

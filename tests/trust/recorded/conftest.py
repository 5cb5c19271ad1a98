from __future__ import annotations

import asyncio

import pytest

from harness.fuzzing.recording import Recording
from harness.fuzzing.scenes import record


@pytest.fixture(scope="session")
def recording() -> Recording:
    """Return what two sides said who did everything there is to do."""
    return asyncio.run(record())

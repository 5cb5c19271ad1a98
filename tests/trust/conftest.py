"""How much the trust tests do, in one table, and what they tell of it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable

import pytest

from asynckv.security.tls import TLS
from asynckv.testing.certificates import Authority


@dataclasses.dataclass(frozen=True)
class Scale:
    """Numbers of a run: those of ``nox -s trust``, or of ``nox -s chaos``."""

    fuzz_inputs: int
    one_meeting_in: int
    simulation_seeds: int
    kills_each_scheme: int
    frozen_cases: int
    hostile_connections: int
    bad_connections: int
    drains: int
    soak_s: float
    waiters: int
    cancellations: int
    connector_cancellations: int
    store_cancellations: int
    costly_grounds: bool


_SCALES = {
    "trust": Scale(
        fuzz_inputs=500_000,
        one_meeting_in=8,
        simulation_seeds=40,
        kills_each_scheme=64,  # and who works at the end
        frozen_cases=20,
        hostile_connections=150,
        bad_connections=60,
        drains=2,
        soak_s=6,
        waiters=10_000,
        cancellations=8_000,
        connector_cancellations=800,
        store_cancellations=200,
        costly_grounds=False,
    ),
    "chaos": Scale(
        fuzz_inputs=20_000_000,
        one_meeting_in=1,
        simulation_seeds=3_000,
        kills_each_scheme=500,
        frozen_cases=100,
        hostile_connections=150,
        bad_connections=2_000,
        drains=100,
        soak_s=1_200,
        waiters=10_000,
        cancellations=100_000,
        connector_cancellations=30_000,
        store_cancellations=10_000,
        costly_grounds=True,
    ),
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest first, each with a short one behind it.

    pytest-xdist begins by giving two to each of its processes.
    """
    longest = [item for item in items if item.get_closest_marker("longest")]
    others = iter([item for item in items if item not in longest])
    pairs = [[item, *itertools.islice(others, 1)] for item in longest]
    items[:] = [*itertools.chain.from_iterable(pairs), *others]


@pytest.fixture(scope="session")
def scale() -> Scale:
    """How much is to be done: ``ASYNCKV_SCALE`` is ``trust`` or ``chaos``."""
    return _SCALES[os.environ.get("ASYNCKV_SCALE", "trust")]


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line of what was measured at the end of the run."""
    began = time.monotonic()

    def tell(line: str) -> None:
        seconds = time.monotonic() - began
        line = f"{request.node.name}: {line} ({seconds:.0f} s)"
        request.node.user_properties.append(("figure", line))

    return tell


@pytest.fixture
def tls(authority: Authority) -> TLS:
    """Certificates of one authority, for both sides."""
    return authority.issue()

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.simulation.machines import Machines, open_machines


@pytest.fixture
def machines() -> Iterator[Machines]:
    with open_machines(seed=1) as machines:
        yield machines
    # A test's own process keeps what these have, files too, until its next test.
    machines.nodes.clear()
    machines.world.runnables.clear()

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynckv.testing.simulation.machines import Machines, open_machines


@pytest.fixture
def machines() -> Iterator[Machines]:
    with open_machines(seed=1) as machines:
        yield machines

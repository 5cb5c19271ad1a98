from __future__ import annotations

import pytest

from asynckv.cli.bench.settings import FULL, QUICK, Scale


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_every_case_has_at_least_five_rounds_and_an_even_number(scale: Scale) -> None:
    assert scale.rounds >= 5
    assert scale.rounds % 2 == 0


def test_the_full_scale_is_what_was_promised() -> None:
    mib = 2**20
    assert (FULL.entry, FULL.layers) == (64 * mib, (64, 16 * mib))
    assert FULL.small == (10_000, 4096)
    assert FULL.outstanding == (1, 10, 100, 1000)
    assert FULL.scattered_nbytes == (4096, 8192, 18432, 65536, 2 * mib)
    assert FULL.rounds * FULL.ticks >= 5000

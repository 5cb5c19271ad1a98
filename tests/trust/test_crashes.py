"""Processes that die or hang in the middle of what they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from asynckv.security.tls import TLS
from asynckv.testing.pairs import Scheme, new_url
from harness.crashes.run import kill_workers, leave_under_load, soak

pytestmark = [
    pytest.mark.trust,
    pytest.mark.multiprocess,
    pytest.mark.timeout(1800),
]
_GROWTH_BYTES = 16 * 2**20
_REMEMBERED_BYTES = 1024


@pytest.mark.parametrize("scheme", ["tcp", "unix", "tls"])
async def test_nothing_is_lost_or_used_twice_however_many_are_killed(
    scheme: Scheme, scale: Any, figures: Callable[[str], None], tls: TLS
) -> None:
    found = await kill_workers(
        new_url(scheme),
        scale.kills_each_scheme,
        seed=len(scheme),
        tls=tls if scheme == "tls" else None,
    )
    figures(
        f"{found.kills} kills, {found.inserted} entries, {found.redelivered} "
        f"redelivered, {found.unseen} taken by the dead, {len(found.wrongs)} wrongs"
    )
    assert found.wrongs == ()
    assert found.redelivered  # some died with an entry in hand


async def test_a_server_that_leaves_under_load_loses_nothing(
    scale: Any, figures: Callable[[str], None]
) -> None:
    inserted = 0
    for seed in range(scale.drains):
        url = new_url("unix" if seed % 2 else "tcp")
        found = await leave_under_load(url, seed)
        assert found.wrongs == (), f"seed {seed}"
        assert found.inserted, f"seed {seed}"
        inserted += found.inserted
    figures(f"{scale.drains} drains under load, {inserted} entries, 0 lost")


async def test_nothing_grows_however_long_it_works(
    scale: Any, figures: Callable[[str], None]
) -> None:
    found, early, late = await soak(new_url("unix"), scale.soak_s)
    growth = late.resident_bytes - early.resident_bytes
    figures(
        f"{scale.soak_s:g} s, {found.inserted} entries, {found.kills} kills, "
        f"{growth / 2**20:+.1f} MiB resident, {late}"
    )
    assert found.wrongs == () and early.remembered
    same = {"resident_bytes": 0, "remembered": 0}
    assert dataclasses.replace(late, **same) == dataclasses.replace(early, **same)
    remembered = late.remembered - early.remembered
    assert growth < _GROWTH_BYTES + _REMEMBERED_BYTES * remembered

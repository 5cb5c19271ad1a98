"""Every transport keeps each check, and what is told wrongly is a fault."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from asynckv.errors import PeerLost
from asynckv.testing.pairs import TRANSPORT_KINDS, TransportKind, open_transport_pair
from asynckv.testing.transport_checks.ending import ENDING_CHECKS, STOPPING_CHECKS
from asynckv.testing.transport_checks.moving import MOVING_CHECKS
from asynckv.testing.transport_checks.sides import (
    Landing,
    Side,
    TransportCheck,
    all_told,
    memory,
    noise,
    open_sides,
)


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", TRANSPORT_KINDS)
@pytest.mark.parametrize(
    "check",
    [*ENDING_CHECKS, *STOPPING_CHECKS, *MOVING_CHECKS],
    ids=lambda check: check.__name__,
)
async def test_a_transport_keeps(check: TransportCheck, kind: TransportKind) -> None:
    await check(partial(open_transport_pair, kind))


async def test_a_landing_is_awaited_for_the_digest_or_for_the_error() -> None:
    landed, failed = Landing(1), Landing(1)
    landed(b"digest", None)
    failed(b"", PeerLost("gone"))
    assert await landed == b"digest"
    assert landed.error is None
    with pytest.raises(PeerLost, match="gone"):
        await failed


async def test_what_is_told_twice_late_or_elsewhere_is_a_fault() -> None:
    side, landing = Side(), Landing(1)
    side.landings.append(landing)
    thread = threading.Thread(target=landing, args=(b"", None))
    thread.start()
    thread.join()
    landing(b"", None)
    landing(b"", None)
    landing.is_stopped = True
    landing(b"", None)
    found = [fault.partition(": ")[2] for fault in side.faults()]
    assert found == ["told outside the loop", "told twice", "told after the stop"]


async def test_a_part_that_nobody_is_told_of_is_a_fault() -> None:
    side = Side()
    side.landings.append(Landing(1))
    assert side.faults() == ["part of transfer 1: never told"]
    with pytest.raises(AssertionError, match="1 of 1 parts not told"):
        await all_told(side, within_s=0.01)


async def test_sides_move_parts_and_note_what_was_stopped() -> None:
    async with open_sides(partial(open_transport_pair, "mem")) as (near, far):
        target = memory(100, 3)
        landing = far.receive(1, 0, target)
        await near.send(1, 0, noise(100))
        await landing
        far.receive(3, 0, memory(1))
        await far.quiesce(3)
        assert [one.is_stopped for one in far.landings] == [False, True]
    assert target.tobytes() == noise(100)
    assert not near.lost

from __future__ import annotations

import pytest

from harness.simulation.world import Spinning, World


class Busy:
    is_runnable = True
    wakes_at = None

    def turn(self) -> None:
        pass


def test_time_jumps_to_the_next_appointment() -> None:
    world, kept = World(1), list[float]()
    world.call_at(3.0, lambda: kept.append(world.now))
    world.call_at(2.0, lambda: kept.append(world.now))
    assert not world.run(lambda: False, deadline=10.0)
    assert kept == [2.0, 3.0]


def test_a_cancelled_appointment_is_not_kept() -> None:
    world, kept = World(1), list[int]()
    world.call_later(1.0, kept.append, 1).cancel()
    assert not world.run(lambda: bool(kept), deadline=10.0)


def test_a_run_ends_at_its_deadline() -> None:
    world = World(1)
    world.call_at(100.0, lambda: None)
    assert not world.run(lambda: False, deadline=10.0)
    assert world.now == 10.0


def test_whoever_is_busy_for_ever_is_found() -> None:
    world = World(1)
    world.runnables.append(Busy())
    with pytest.raises(Spinning):
        world.run(lambda: False, deadline=1e9)


def test_chance_for_another_purpose_is_other_chance() -> None:
    world = World(1)
    assert world.chance("a").random() == World(1).chance("a").random()
    assert world.chance("a").random() != world.chance("b").random()
    assert world.chance("a").random() != World(2).chance("a").random()

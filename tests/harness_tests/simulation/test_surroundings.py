from __future__ import annotations

import os
import random
import secrets
import threading
import uuid

from harness.simulation.machines import Machines, open_machines
from harness.simulation.nodes import Process


def chance_in_a_node(seed: int) -> list[str]:
    seen = list[str]()

    async def main(process: Process) -> None:
        seen.extend((os.urandom(8).hex(), secrets.token_hex(8), uuid.uuid4().hex))
        seen.extend((f"{random.random()}", f"{os.getpid()}"))

    with open_machines(seed) as machines:
        machines.add("one").start(main)
        assert machines.world.run(lambda: bool(seen), deadline=1)
    return seen


def test_all_chance_and_identity_in_a_node_come_from_the_seed() -> None:
    assert chance_in_a_node(7) == chance_in_a_node(7)
    assert not set(chance_in_a_node(7)[:4]) & set(chance_in_a_node(8)[:4])


def test_the_world_and_other_threads_keep_the_real_ones(machines: Machines) -> None:
    found = list[object]()

    def outside() -> None:
        found.append(os.getpid())

    thread = threading.Thread(target=outside)
    thread.start()
    thread.join()
    assert found == [os.getpid()]


def test_the_state_of_chance_outside_is_not_touched() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    chance_in_a_node(1)
    assert random.random() == expected

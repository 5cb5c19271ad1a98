"""A seed is one story, byte for byte, and a run says which promises were kept."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys

import pytest

from harness.simulation import command
from harness.simulation.command import Totals, main
from harness.simulation.machines import open_machines
from harness.simulation.scenario import Scenario
from harness.simulation.verdict import Verdict, simulate
from harness.simulation.world import Story

SEEDS = (7, 21)


def test_a_seed_replays_byte_for_byte_and_no_other_does() -> None:
    first, second, other = (simulate(seed, min_events=300) for seed in (7, 7, 21))
    assert list(first.story.text()) == list(second.story.text())
    assert str(first) == str(second)
    assert first.story.digest() == second.story.digest() != other.story.digest()


@pytest.mark.chaos
@pytest.mark.multiprocess
def test_a_seed_replays_in_another_process_with_other_hashes() -> None:
    code = (
        "from harness.simulation.verdict import simulate\n"
        f"print(*(simulate(seed, min_events=300) for seed in {SEEDS}), sep='|')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = "|".join(str(simulate(seed, min_events=300)) for seed in SEEDS)
    assert done.stdout == f"{here}\n"


async def test_a_seed_keeps_its_promises_beside_a_loop_and_says_so() -> None:
    verdict = simulate(1)
    assert asyncio.get_running_loop().is_running()
    assert verdict.broken == () and verdict.events >= 2000
    assert str(verdict).startswith("seed 1: kept; ")


def test_servers_and_clients_that_crash_come_back_and_leave_nothing_behind() -> None:
    with open_machines(seed=3) as machines:
        scenario = Scenario(machines, min_events=1000)
        for at, node in ((2.0, scenario.server), (3.0, scenario.clients[0])):
            machines.world.call_at(at, scenario._crash, node, at > 2)
            machines.world.call_at(at + 0.5, scenario._start, node)
        scenario.run()
    assert len(scenario.watch.lives) == 2
    assert len(scenario.clients[0].processes) == 2
    assert scenario.watch.complaints == machines.faults() == []
    selects, others = {"take", "borrow", "read"}, {"peek", "taken", "withdraw"}
    verbs = {call.verb for call in scenario.history.calls}
    assert verbs == {"insert", "write"} | selects | others


def fake(seed: int, *, min_events: int) -> Verdict:
    story = Story()
    story.add(0.5, "bytes", "", "a > b: 5 bytes")
    story.add(1.5, "call", "client1", "1 take any")
    broken = ("lost: e1",) if seed == 3 else ()
    return Verdict(seed, broken, story, calls=1, faults=0, seconds=2.0)


def said(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    status = main(arguments, out)
    return status, out.getvalue()


def test_the_command_names_seeds_that_broke_a_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "simulate", fake)
    status, text = said("--seed", "2")
    assert status == 0 and "1 take any" in text and "seed 2: kept" in text
    status, text = said("--seeds", "0:100")
    assert status == 1 and "seed 3: 1 BROKEN" in text and "    lost: e1" in text
    assert text.endswith(
        "100 seeds, 200 events, at least 2 each, 100 calls: 1 BROKEN, seeds 3\n"
    )


def test_totals_of_several_processes_are_added() -> None:
    totals = Totals(seeds=10, events=500, fewest=12, calls=50, broken=[7])
    for other in (Totals(2, 20, 9, 5), Totals(3, 30, 10, 6, [11, 4])):
        totals.add(str(other))
    assert totals == Totals(15, 550, 9, 61, [7, 4, 11])
    with pytest.raises(ValueError, match="no totals"):
        totals.add("Killed")

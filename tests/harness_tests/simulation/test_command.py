from __future__ import annotations

import io
from pathlib import Path

import pytest

from harness.simulation import command
from harness.simulation.command import Totals, main
from harness.simulation.story import Story
from harness.simulation.verdict import Verdict


def fake(seed: int, *, min_events: int) -> Verdict:
    story = Story()
    story.add(0.5, "bytes", "", "a > b: 5 bytes")
    story.add(1.5, "call", "client1", "1 take any")
    broken = ("lost: e1",) if seed == 3 else ()
    return Verdict(seed, broken, story, calls=1, faults=0, seconds=2.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "simulate", fake)


def said(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    status = main(arguments, out)
    return status, out.getvalue()


def test_one_seed_tells_its_story_and_its_verdict() -> None:
    status, text = said("--seed", "2")
    assert status == 0
    assert "1 take any" in text
    assert "5 bytes" not in text
    assert "seed 2: kept" in text
    assert "5 bytes" in said("--seed", "2", "--bytes")[1]
    assert "1 take any" not in said("--seed", "2", "--quiet")[1]


def test_many_seeds_name_those_that_broke_a_promise() -> None:
    status, text = said("--seeds", "0:100")
    assert status == 1
    assert "seed 3: 1 BROKEN" in text
    assert "    lost: e1" in text
    assert "seed 4" not in text
    assert text.endswith(
        "100 seeds, 200 events, at least 2 each, 100 calls: 1 BROKEN, seeds 3\n"
    )


def test_a_story_can_be_kept_whole(tmp_path: Path) -> None:
    kept = tmp_path / "story"
    said("--seed", "1", "--out", str(kept))
    assert "5 bytes" in kept.read_text()


def test_a_range_without_seeds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        said("--seeds", "5:5")
    assert "holds no seed" in capsys.readouterr().err


def test_totals_of_several_processes_are_added() -> None:
    totals = Totals(seeds=10, events=500, fewest=12, calls=50, broken=[7])
    for other in (Totals(2, 20, 9, 5), Totals(3, 30, 10, 6, [11, 4])):
        totals.add(str(other))
    assert totals == Totals(15, 550, 9, 61, [7, 4, 11])
    assert str(totals).endswith("3 BROKEN, seeds 4, 7, 11")
    with pytest.raises(ValueError, match="no totals"):
        totals.add("Killed")


@pytest.mark.chaos  # tests/trust/test_simulation.py does so anyway
@pytest.mark.multiprocess
def test_seeds_are_shared_out_to_processes() -> None:
    status, text = said("--seeds", "1:3", "--events", "50", "--processes", "2")
    assert status == 0
    assert "seed 1: kept" in text
    assert "seed 2: kept" in text
    assert "2 seeds, " in text

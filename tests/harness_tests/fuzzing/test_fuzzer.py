from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from harness.fuzzing import coverage_guided, fuzzer
from harness.fuzzing.__main__ import main
from harness.fuzzing.corpus import Corpus, Target, expect
from harness.fuzzing.fuzzer import TARGETS, Failing, Report, fuzz, fuzz_target, replay

CORPUS = Corpus(1)


def _make(rng: random.Random, corpus: Corpus) -> bytes:
    return rng.randbytes(1 + rng.randrange(4))


def _dislike(data: bytes) -> None:
    expect(data[0] < 250, "too large a byte", data)
    if data[0] == 7:
        raise KeyError(7)


PICKY = Target("picky", _make, _dislike)


def run(target: Target, inputs: int = 3000) -> Report:
    report = Report()
    fuzz_target(target, 1, inputs, CORPUS, report)
    return report


def test_a_run_tries_all_targets_and_finds_nothing() -> None:
    report = fuzz(1, 400)
    assert set(report.inputs) == set(TARGETS) and report.total >= 400
    assert report.slowest_s > 0 and report.most_held_bytes > 0
    assert report.failing == {}


def test_of_each_kind_the_shortest_input_is_kept_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = run(PICKY).failing
    assert failing == run(PICKY).failing
    kinds = {(f.kind.split(" ")[1], len(f.data)) for f in failing.values()}
    assert kinds == {("Finding", 1), ("KeyError", 1)}
    monkeypatch.setattr(fuzzer, "TARGETS", {"picky": PICKY})
    for one in failing.values():
        with pytest.raises(Exception, match="7|too large"):
            replay(one.save(tmp_path / "found"))


def test_an_input_that_takes_long_or_for_which_much_is_held_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hold(data: bytes) -> None:
        bytearray(2**20).clear()

    report = run(Target("greedy", _make, hold), 5)
    assert [f.error[-50:] for f in report.failing.values() if "holds 10" in f.error]
    monkeypatch.setattr(fuzzer, "_SLOW_S", 0)
    monkeypatch.setattr(fuzzer, "_MAX_S", 1e-9)
    report = run(Target("slow", _make, lambda data: None), 20)
    assert any("takes 0.0" in f.error for f in report.failing.values())


def test_the_command_replays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Failing("urls", "seed 1, input 2", "kind", b"mem:@", "error").save(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fuzzing", "--replay", str(path)])
    main()
    assert capsys.readouterr().out == "nothing is wrong with it any more\n"


@pytest.mark.multiprocess
def test_steered_by_coverage_it_finds_nothing_in_a_few_runs() -> None:
    """What there is to do without atheris, where it is not installed."""
    if importlib.util.find_spec("atheris") is None:
        with pytest.raises(SystemExit, match="pip install atheris"):
            coverage_guided.main(["wire"])
        return
    for target, status in (("wire", 0), ("greeting", 0), ("manifest", 0), ("none", 1)):
        command = (sys.executable, "-m", "harness.fuzzing.coverage_guided", target)
        ran = subprocess.run((*command, "-runs=1000"), capture_output=True, check=False)
        assert ran.returncode == status, ran.stderr.decode()

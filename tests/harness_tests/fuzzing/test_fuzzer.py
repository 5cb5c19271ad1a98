from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.fuzzing import coverage_guided, fuzzer
from harness.fuzzing.__main__ import main
from harness.fuzzing.corpus import Corpus
from harness.fuzzing.fuzzer import TARGETS, Failing, Report, fuzz, fuzz_target, replay
from harness.fuzzing.oracle import Target, expect

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


def test_of_each_kind_the_shortest_input_is_kept_of_the_same_seed() -> None:
    report = run(PICKY)
    assert report.inputs == {"picky": 3000}
    failing = report.failing
    assert failing == run(PICKY).failing
    assert {(f.kind.split(" ")[1], len(f.data)) for f in failing.values()} == {
        ("Finding", 1),
        ("KeyError", 1),
    }


def test_what_was_found_is_replayed_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzer, "TARGETS", {"picky": PICKY})
    for failing in run(PICKY).failing.values():
        path = failing.save(tmp_path / "found")
        assert Failing.load(path) == failing
        with pytest.raises(Exception, match="7|too large"):
            replay(path)


def test_an_input_that_takes_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzer, "_SLOW_S", 0)
    monkeypatch.setattr(fuzzer, "_MAX_S", 1e-9)
    report = run(Target("slow", _make, lambda data: None), 20)
    assert any("takes 0.0" in f.error for f in report.failing.values())


def test_an_input_for_which_much_is_held_is_found() -> None:
    def hold(data: bytes) -> None:
        bytearray(2**20).clear()

    report = run(Target("greedy", _make, hold), 5)
    assert [f.error[-50:] for f in report.failing.values() if "holds 10" in f.error]


Command = Callable[..., str]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    def run_it(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fuzzing", *arguments])
        main()
        return capsys.readouterr().out

    return run_it


def test_the_command_replays(tmp_path: Path, command: Command) -> None:
    path = Failing("urls", "seed 1, input 2", "kind", b"mem:@", "error").save(tmp_path)
    said = command("--replay", str(path))
    assert said == "nothing is wrong with it any more\n"


_is_here = importlib.util.find_spec("atheris") is not None


needs_atheris = pytest.mark.skipif(not _is_here, reason="atheris is not installed")


@pytest.mark.skipif(_is_here, reason="atheris is installed")
def test_without_atheris_it_says_so() -> None:
    with pytest.raises(SystemExit, match="pip install atheris"):
        coverage_guided.main(["wire"])


@needs_atheris
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("wire", 0, b""),
        ("greeting", 0, b""),
        ("manifest", 0, b""),
        ("none", 1, b"name one of these first: wire"),
    ],
)
def test_steered_by_coverage_it_finds_nothing_in_a_few_runs(
    target: str, status: int, said: bytes
) -> None:
    command = (sys.executable, "-m", "harness.fuzzing.coverage_guided", target)
    ran = subprocess.run((*command, "-runs=1000"), capture_output=True, check=False)
    assert ran.returncode == status, ran.stderr.decode()
    assert said in ran.stderr

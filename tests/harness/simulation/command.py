"""``python -m harness.simulation``: run seeds, and tell the story of one."""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TextIO

from harness.simulation.verdict import simulate

__all__ = ("Totals", "main")

_FEW: Final = 20
"""Of so many seeds each one's verdict is told."""

_TOTALS: Final = re.compile(
    r"(\d+) seeds, (\d+) events, at least (\d+) each, (\d+) calls: .*?([\d, ]*)$"
)


@dataclasses.dataclass
class Totals:
    """What came of all seeds together."""

    seeds: int = 0
    events: int = 0
    fewest: int = 0
    calls: int = 0
    broken: list[int] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        said = "every promise kept"
        if self.broken:
            numbers = ", ".join(map(str, sorted(self.broken)))
            said = f"{len(self.broken)} BROKEN, seeds {numbers}"
        return (
            f"{self.seeds} seeds, {self.events} events, at least {self.fewest} each, "
            f"{self.calls} calls: {said}"
        )

    def count(self, seeds: int, events: int, fewest: int, calls: int) -> None:
        """Add some seeds, none of which had fewer events than ``fewest``."""
        self.fewest = min(self.fewest, fewest) if self.seeds else fewest
        self.seeds += seeds
        self.events += events
        self.calls += calls

    def add(self, line: str) -> None:
        """Add what another process says in its last line.

        :raises ValueError: it says something else
        """
        found = _TOTALS.search(line)
        if found is None:
            raise ValueError(f"no totals in {line!r}")
        seeds, events, fewest, calls = map(int, found.groups()[:4])
        self.count(seeds, events, fewest, calls)
        self.broken += map(int, re.findall(r"\d+", found[5]))


def main(arguments: Sequence[str] | None = None, out: TextIO | None = None) -> int:
    """Run what the command line asks for; return 1 if a promise was broken."""
    chosen = _parser().parse_args(arguments)
    out = out or sys.stdout
    totals = Totals()
    if chosen.processes > 1 and chosen.seed is None:
        _run_in_processes(chosen, out, totals)
    else:
        _run(chosen, out, totals)
    _write(out, [str(totals)])
    return 1 if totals.broken else 0


def _run(chosen: argparse.Namespace, out: TextIO, totals: Totals) -> None:
    seeds = chosen.seeds if chosen.seed is None else [chosen.seed]
    for seed in seeds:
        verdict = simulate(seed, min_events=chosen.events)
        totals.count(1, verdict.events, verdict.events, verdict.calls)
        totals.broken += [seed] if verdict.broken else []
        if chosen.seed is not None and not chosen.quiet:
            _write(out, verdict.story.text(with_bytes=chosen.bytes))
        if verdict.broken or len(seeds) <= _FEW or chosen.verbose:
            _write(out, [str(verdict), *(f"    {what}" for what in verdict.broken)])
        if chosen.out is not None:
            text = "\n".join(verdict.story.text())
            Path(chosen.out).write_text(f"{text}\n{verdict}\n", encoding="utf-8")


def _run_in_processes(chosen: argparse.Namespace, out: TextIO, totals: Totals) -> None:
    share = -(-len(chosen.seeds) // chosen.processes)
    parts = [chosen.seeds[i : i + share] for i in range(0, len(chosen.seeds), share)]
    command = [sys.executable, "-m", "harness.simulation"]
    command += ["--events", str(chosen.events), *(["--verbose"] * chosen.verbose)]
    running = [
        subprocess.Popen(
            [*command, "--seeds", f"{part[0]}:{part[-1] + 1}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in parts
    ]
    for process in running:
        told = process.communicate()[0].splitlines() or [""]
        _write(out, told[:-1])
        totals.add(told[-1])


def _write(out: TextIO, lines: Iterable[str]) -> None:
    for line in lines:
        out.write(f"{line}\n")
    out.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.simulation",
        description="Run asynckv's own code on virtual machines under faults.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="run this one, and tell its story")
    which.add_argument(
        "--seeds",
        type=_seeds,
        default=range(10),
        metavar="A:B",
        help="run these, the last one excluded (0:10)",
    )
    for name, default, what in (
        ("--events", 2000, "at least so many a seed"),
        ("--processes", 1, "run many seeds in so many processes"),
    ):
        text = f"{what} ({default})"
        parser.add_argument(name, type=int, default=default, help=text)
    for name, what in (
        ("--bytes", "tell of every slice that arrives"),
        ("--quiet", "tell no story, only the verdict"),
        ("--verbose", "tell the verdict of every seed"),
    ):
        parser.add_argument(name, action="store_true", help=what)
    parser.add_argument("--out", help="write the whole story of the last seed there")
    return parser


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    seeds = range(int(first), int(end))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} holds no seed")
    return seeds

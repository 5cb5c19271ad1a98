"""A run: so many inputs of each target, from a seed; what was found can be replayed."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Self

from harness.fuzzing.corpus import Corpus, Finding, Target, measured
from harness.fuzzing.greeting_target import GREETING
from harness.fuzzing.peer_target import PEER
from harness.fuzzing.text_targets import CONFIG, SIZES, URLS
from harness.fuzzing.wire_target import CHUNKS, MANIFEST, WIRE

__all__ = ("TARGETS", "Failing", "Report", "fuzz", "fuzz_target", "replay")

TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for target in (WIRE, GREETING, CHUNKS, MANIFEST, URLS, CONFIG, SIZES, PEER)
}
_SHARES: Final[Mapping[str, int]] = {
    "wire": 1900,
    "greeting": 120,
    "chunks": 950,
    "manifest": 760,
    "urls": 180,
    "config": 10,
    "sizes": 79,
    "peer": 1,
}
"""Of four thousand inputs; a meeting with a peer takes as long as 150 frames."""

_BATCH: Final = 200
_MAX_FINDINGS: Final = 20
_SLOW_S: Final = 0.01
_MAX_S: Final = 0.05
_MEASURED_EVERY: Final = 512
_MAX_HELD_BYTES: Final = 2**19
_MAX_HELD_TIMES: Final = 40


@dataclasses.dataclass(frozen=True)
class Failing:
    """An input for which something was wrong, and how it came about.

    ``kind`` says what, and where: of each kind a run keeps the shortest input.
    """

    target: str
    seed: str
    kind: str
    data: bytes
    error: str

    def save(self, folder: Path) -> Path:
        """Write it to a file of ``folder``, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.target}-{zlib.crc32(self.data):08x}.txt"
        lines = [self.target, self.seed, self.kind, self.data.hex(), self.error]
        path.write_text("\n".join(lines))
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` has written."""
        target, seed, kind, data, error = path.read_text().split("\n", 4)
        return cls(target, seed, kind, bytes.fromhex(data), error)


@dataclasses.dataclass
class Report:
    """What a run came to."""

    inputs: dict[str, int] = dataclasses.field(default_factory=dict)
    failing: dict[str, Failing] = dataclasses.field(default_factory=dict)
    slowest_s: float = 0.0
    most_held_bytes: int = 0
    seconds: float = 0.0
    processor_s: float = 0.0

    @property
    def total(self) -> int:
        """How many inputs there were."""
        return sum(self.inputs.values())

    def add(self, failing: Failing) -> None:
        """Keep a failing input, unless a shorter one of its kind is known."""
        known = self.failing.get(failing.kind)
        if known is None or len(failing.data) < len(known.data):
            self.failing[failing.kind] = failing


def fuzz(seed: int, inputs: int, recorded: Iterable[bytes] = ()) -> Report:
    """Try at least so many inputs, of all targets."""
    report, corpus = Report(), Corpus(seed, recorded)
    started, used = time.perf_counter(), time.process_time()
    for name, share in _SHARES.items():
        count = -(-inputs * share // sum(_SHARES.values()))
        fuzz_target(TARGETS[name], seed, count, corpus, report)
    report.seconds = time.perf_counter() - started
    report.processor_s = time.process_time() - used
    return report


def fuzz_target(
    target: Target, seed: int, inputs: int, corpus: Corpus, report: Report
) -> None:
    """Try ``inputs`` of one target. Stops early if it finds very much."""
    logger, quiet = logging.getLogger("asynckv"), logging.NullHandler()
    logger.addHandler(quiet)
    propagated, logger.propagate = logger.propagate, False
    try:
        for number, (source, data) in enumerate(_inputs(target, seed, inputs, corpus)):
            report.inputs[target.name] = number + 1
            _try(target, source, data, report, measures=not number % _MEASURED_EVERY)
            if len(report.failing) >= _MAX_FINDINGS:
                return
    finally:
        logger.propagate = propagated
        logger.removeHandler(quiet)


def _inputs(
    target: Target, seed: int, inputs: int, corpus: Corpus
) -> Iterator[tuple[str, bytes]]:
    rng = random.Random()
    for number in range(inputs):
        if not number % _BATCH:
            rng.seed(f"{target.name} {seed} {number}")
        yield f"seed {seed}, input {number}", target.make(rng, corpus)


def _try(
    target: Target, source: str, data: bytes, report: Report, *, measures: bool
) -> None:
    started = time.perf_counter()
    try:
        if measures:
            _measure(target, data, report)
        else:
            target.check(data)
            _time(target, data, time.perf_counter() - started, report)
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is a finding
        where = traceback.extract_tb(exc.__traceback__)[-1]
        what = str(exc).partition(":")[0] if isinstance(exc, Finding) else ""
        kind = f"{target.name}: {type(exc).__name__} {what} {where.name}:{where.lineno}"
        text = "".join(traceback.format_exception(exc))
        report.add(Failing(target.name, source, kind, data, text))


def _time(target: Target, data: bytes, seconds: float, report: Report) -> None:
    if seconds > _SLOW_S:  # others may have had the processor, or garbage was collected
        seconds = min(_cpu_seconds(target, data) for _ in range(3))
        if seconds > _MAX_S:
            raise Finding(f"takes {seconds:.3f} s")
    report.slowest_s = max(report.slowest_s, seconds)


def _cpu_seconds(target: Target, data: bytes) -> float:
    started = time.thread_time()
    target.check(data)
    return time.thread_time() - started


def _measure(target: Target, data: bytes, report: Report) -> None:
    held = measured(target.check, data)
    report.most_held_bytes = max(report.most_held_bytes, held)
    if target.name != "peer" and held > _MAX_HELD_BYTES + _MAX_HELD_TIMES * len(data):
        raise Finding(f"holds {held} bytes for an input of {len(data)}")


def replay(path: Path) -> None:
    """Try an input again that a run has saved; raises what is wrong with it."""
    failing = Failing.load(path)
    TARGETS[failing.target].check(failing.data)

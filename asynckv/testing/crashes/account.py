"""What workers have told, and what must hold of it: nothing lost, nothing twice."""

from __future__ import annotations

import collections
import dataclasses

from asynckv.buffers.statistics import LookupStatistics
from asynckv.testing.crashes.orders import Report

__all__ = ("Account", "Findings")


@dataclasses.dataclass(frozen=True)
class Findings:
    """What came of a run. ``wrongs`` is empty if all promises were kept.

    ``redelivered`` deliveries had ``attempt`` above 1; ``unseen`` entries were
    acknowledged by the plain await of a worker that was killed before it could
    tell (at most once: above 64 KiB the entry is the application's by then).
    """

    kills: int
    inserted: int
    used: int
    left: int
    redelivered: int
    unseen: int
    wrongs: tuple[str, ...]


class Account:
    """Hears reports and keeps what each worker was doing last."""

    def __init__(self) -> None:
        self.kills = 0
        self.last: dict[int, Report] = {}
        self.begun: dict[str, int] = {}
        self._in: set[str] = set()
        self._got: collections.Counter[str] = collections.Counter()
        self._done: collections.Counter[str] = collections.Counter()
        self._may_repeat: set[str] = set()
        self._redelivered = 0
        self._killed_in_plain_wait = 0
        self._wrongs: list[str] = []

    def hear(self, report: Report) -> None:
        """Note one report."""
        entry_id, number = report.entry_id, report.number
        match report.word:
            case "begun":
                self.begun[entry_id.rpartition("-")[0]] = number
            case "in":
                self._in.add(entry_id)
            case "got":
                self._got[entry_id] += 1
                self._redelivered += number > 1
            case "done":
                self._done[entry_id] += 1
                if number:
                    self._may_repeat.add(entry_id)
            case "wrong":
                self._wrongs.append(f"wrong bytes in {entry_id}")
            case "gone":
                self._on_gone(report)
        self.last[report.pid] = report

    def find(self, wrong: str) -> None:
        """Note what is wrong."""
        self._wrongs.append(wrong)

    def next_number(self, producer: str) -> int:
        """Return where a producer that was killed goes on: what is not known in."""
        number = self.begun.get(producer, 0)
        return number + 1 if f"{producer}-{number}" in self._in else number

    def close(self, left: list[str], before_drain: LookupStatistics) -> Findings:
        """Judge, with the ids that a last drain found."""
        wrongs = self._wrongs
        wrongs += [
            f"{entry_id} was acknowledged {count} times"
            for entry_id, count in self._done.items()
            if count > 1 and entry_id not in self._may_repeat
        ]
        wrongs += [f"{x} was there and had been used" for x in left if self._done[x]]
        wrongs += [f"{x} was drained {n} times" for x, n in _repeated(left)]
        unseen = [x for x in self._in if x not in left and not self._got[x]]
        if len(unseen) > self._killed_in_plain_wait:
            wrongs.append(f"lost: {unseen} by {self._killed_in_plain_wait} kills")
        now = before_drain
        if now.inserted != now.acknowledged + len(left):
            wrongs.append(
                f"{now.inserted} in, {now.acknowledged} out, {len(left)} left"
            )
        if now.expired or now.withdrawn or now.undeliverable:
            wrongs.append(f"entries left that had no reason to: {now}")
        return Findings(
            kills=self.kills,
            inserted=len(self._in),
            used=len(self._done),
            left=len(left),
            redelivered=self._redelivered,
            unseen=len(unseen),
            wrongs=tuple(wrongs),
        )

    def _on_gone(self, report: Report) -> None:
        if report.number == 9:  # what waitpid says of a SIGKILL
            self.kills += 1
            last = self.last.get(report.pid)
            if last is not None and last.word == "wait" and last.number:
                self._killed_in_plain_wait += 1
        else:
            self._wrongs.append(f"process {report.pid} ended by {report.number}")


def _repeated(ids: list[str]) -> list[tuple[str, int]]:
    return [(x, n) for x, n in collections.Counter(ids).items() if n > 1]

"""What workers have told, and what must hold of it: nothing lost, nothing twice."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from asynckv.buffers.statistics import LookupStatistics
from asynckv.testing.crashes.marks import Mark, Marks
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
    """Hears reports and keeps what each worker was doing last.

    ``server_leaves``: then workers may lose it.
    """

    def __init__(self, *, server_leaves: bool = False) -> None:
        self.kills = 0
        self._server_leaves = server_leaves
        self.last: dict[int, Report] = {}
        self.begun: dict[str, int] = {}
        self._marks = Marks()
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
                self._marks.add(entry_id, Mark.IN)
            case "got":
                self._marks.add(entry_id, Mark.GOT)
                self._redelivered += number > 1
            case "done":
                self._on_done(entry_id, may_repeat=bool(number))
            case "wrong":
                self._wrongs.append(f"wrong bytes in {entry_id}")
            case "left" if not self._server_leaves:
                self._wrongs.append(f"process {report.pid} lost a server that is there")
            case "gone":
                self._on_gone(report)
        if report.word != "gone":
            self.last[report.pid] = report

    def find(self, wrong: str) -> None:
        """Note what is wrong."""
        self._wrongs.append(wrong)

    def next_number(self, producer: str) -> int:
        """Return where a producer that was killed goes on: what is not known in."""
        number = self.begun.get(producer, 0)
        return number + 1 if self._marks[f"{producer}-{number}"] & Mark.IN else number

    def close(self, left: list[str], before_drain: LookupStatistics) -> Findings:
        """Judge, with the ids that a last drain found."""
        wrongs = self._wrongs
        marks = self._marks
        wrongs += [
            f"{entry_id} was acknowledged more than once"
            for entry_id in marks.having(Mark.DONE_AGAIN, Mark.MAY_REPEAT)
        ]
        wrongs += [
            f"{entry_id} was there and had been used"
            for entry_id in left
            if marks[entry_id] & Mark.DONE
        ]
        wrongs += [f"{x} was drained {n} times" for x, n in _repeated(left)]
        unseen = sorted(set(marks.having(Mark.IN, Mark.GOT)) - set(left))
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
            inserted=_count(marks.having(Mark.IN)),
            used=_count(marks.having(Mark.DONE)),
            left=len(left),
            redelivered=self._redelivered,
            unseen=len(unseen),
            wrongs=tuple(wrongs),
        )

    def _on_done(self, entry_id: str, *, may_repeat: bool) -> None:
        again = self._marks[entry_id] & Mark.DONE
        self._marks.add(entry_id, Mark.DONE_AGAIN if again else Mark.DONE)
        if may_repeat:
            self._marks.add(entry_id, Mark.MAY_REPEAT)

    def _on_gone(self, report: Report) -> None:
        if report.number == 9:  # what waitpid says of a SIGKILL
            self.kills += 1
            last = self.last.pop(report.pid, None)
            if last is not None and last.word == "wait" and last.number:
                self._killed_in_plain_wait += 1
        elif report.number:
            self._wrongs.append(f"process {report.pid} ended by {report.number}")


def _count(ids: Iterable[str]) -> int:
    return sum(1 for _ in ids)


def _repeated(ids: list[str]) -> list[tuple[str, int]]:
    return [(x, n) for x, n in collections.Counter(ids).items() if n > 1]

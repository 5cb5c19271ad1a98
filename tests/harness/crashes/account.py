"""What workers have told, and what must hold of it: nothing lost, nothing twice."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable, Iterator
from typing import Final

from asynckv.buffers.statistics import LookupStatistics
from harness.crashes.workers import AWAITS, Report

__all__ = (
    "Account",
    "Findings",
    "Mark",
    "Marks",
)


@dataclasses.dataclass(frozen=True)
class Findings:
    """What came of a run. ``wrongs`` is empty if all promises were kept.

    ``redelivered`` deliveries had ``attempt`` above 1; ``unseen`` entries were
    acknowledged by a worker that was killed before it could tell: by its plain
    await (at most once: above 64 KiB the entry is the application's by then), or
    on its way out of the body that had it.
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

    What left the buffer was acknowledged in somebody's name, and that one has
    said so, or said that it was about to and could say no more. A plain await
    says nothing before: so many may be unseen as were lost in one.
    ``server_leaves``: then workers may lose it.
    """

    def __init__(self, *, server_leaves: bool = False) -> None:
        self.kills = 0
        self._server_leaves = server_leaves
        self.last: dict[int, Report] = {}
        self.begun: dict[str, int] = {}
        self._marks = Marks()
        self._redelivered = 0
        self._awaiting: set[int] = set()
        self._last_taken: dict[int, str] = {}
        self._perhaps_untold: set[str] = set()
        self._killed_in_await = 0
        self._wrongs: list[str] = []

    def hear(self, report: Report) -> None:
        """Note one report."""
        entry_id, number = report.entry_id, report.number
        match report.word:
            case "begun":
                self.begun[entry_id.rpartition("-")[0]] = number
            case "in":
                self._marks.add(entry_id, Mark.IN)
            case "wait":
                self._awaiting.discard(report.pid)
                if number:
                    self._awaiting.add(report.pid)
            case "got":
                self._marks.remove(entry_id, Mark.LEAVING)
                self._redelivered += number > 1
            case "done":
                self._on_done(report, may_repeat=bool(number))
            case "wrong":
                self._wrongs.append(f"wrong bytes in {entry_id}")
            case "left":
                self._on_lost(report.pid)
                if not self._server_leaves:
                    self.find(
                        f"process {report.pid} lost a server that is there: "
                        f"{report.why}"
                    )
            case "gone":
                self._on_gone(report)
        if report.word != "gone":
            self.last[report.pid] = report

    def hear_acknowledged(self, entry_id: str, consumer: str) -> None:
        """Note in whose name the buffer counted an acknowledgement."""
        name, _, _ = consumer.partition("@")  # what a certificate adds
        awaits = name.endswith(AWAITS)
        self._marks.add(entry_id, Mark.BY_AWAIT if awaits else Mark.BY_BODY)

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
            if marks[entry_id] & Mark.DONE and entry_id not in self._perhaps_untold
        ]
        wrongs += [f"{x} was drained {n} times" for x, n in _repeated(left)]
        gone = set(marks.having(Mark.IN, Mark.DONE)) - set(left)
        by_await = sorted(x for x in gone if marks[x] & Mark.BY_AWAIT)
        on_its_way_out = Mark.LEAVING | Mark.BY_BODY
        by_body = {x for x in gone if marks[x] & on_its_way_out == on_its_way_out}
        unseen = by_body.union(by_await)
        wrongs += [f"lost: {entry_id}" for entry_id in sorted(gone - unseen)]
        if len(by_await) > self._killed_in_await:
            wrongs.append(f"lost: {by_await} by {self._killed_in_await} kills")
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

    def _on_done(self, report: Report, *, may_repeat: bool) -> None:
        entry_id = report.entry_id
        again = self._marks[entry_id] & Mark.DONE
        self._marks.add(entry_id, Mark.DONE_AGAIN if again else Mark.DONE)
        if may_repeat:
            self._marks.add(entry_id, Mark.MAY_REPEAT)
            self._last_taken[report.pid] = entry_id

    def _on_gone(self, report: Report) -> None:
        if report.number == 9:  # what waitpid says of a SIGKILL
            self.kills += 1
            self._on_lost(report.pid)
            self.last.pop(report.pid, None)
        elif report.number:
            self._wrongs.append(f"process {report.pid} ended by {report.number}")

    def _on_lost(self, pid: int) -> None:
        """What that process was doing may have happened or not.

        The buffer may not have heard of the last small entry that a plain await gave.
        """
        if taken := self._last_taken.pop(pid, None):
            self._perhaps_untold.add(taken)
        last = self.last.get(pid)
        if last is None:
            return
        if last.word == "leaving":
            self._marks.add(last.entry_id, Mark.LEAVING)
        elif last.word in ("wait", "got") and pid in self._awaiting:
            self._killed_in_await += 1
        self._awaiting.discard(pid)


def _count(ids: Iterable[str]) -> int:
    return sum(1 for _ in ids)


def _repeated(ids: list[str]) -> list[tuple[str, int]]:
    return [(x, n) for x, n in collections.Counter(ids).items() if n > 1]


class Mark(enum.IntFlag):
    """What has happened to an entry; as many as fill a byte."""

    IN = 1
    DONE = 2
    DONE_AGAIN = 4
    MAY_REPEAT = 8
    LEAVING = 16
    """A worker was lost on its way out of the body that had it."""
    BY_AWAIT = 32
    """It was acknowledged by a plain await."""
    BY_BODY = 64
    """It was acknowledged by leaving a body."""


_NO_MARK: Final = Mark(0)


class Marks:
    """Marks of entries by id: the name of a producer, a dash, a number."""

    def __init__(self) -> None:
        self._of: collections.defaultdict[str, bytearray]
        self._of = collections.defaultdict(bytearray)

    def __getitem__(self, entry_id: str) -> Mark:
        producer, number = _parts(entry_id)
        marks = self._of.get(producer, b"")
        return Mark(marks[number] if number < len(marks) else 0)

    def add(self, entry_id: str, mark: Mark) -> None:
        """Mark an entry."""
        producer, number = _parts(entry_id)
        marks = self._of[producer]
        marks.extend(bytes(max(0, number + 1 - len(marks))))
        marks[number] |= mark

    def remove(self, entry_id: str, mark: Mark) -> None:
        """Unmark an entry."""
        if self[entry_id] & mark:
            producer, number = _parts(entry_id)
            self._of[producer][number] &= ~mark

    def having(self, all_of: Mark, none_of: Mark = _NO_MARK) -> Iterator[str]:
        """Yield the ids of entries that have the ones and not the others."""
        for producer, marks in self._of.items():
            for number, mark in enumerate(marks):
                if mark & all_of == all_of and not mark & none_of:
                    yield f"{producer}-{number}"


def _parts(entry_id: str) -> tuple[str, int]:
    producer, _, number = entry_id.rpartition("-")
    return producer, int(number)

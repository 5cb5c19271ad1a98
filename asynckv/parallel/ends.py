"""What ranks say of the ends of transfers, until all of them have said it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asynckv.parallel.outputs import KVConnectorOutput
from asynckv.parallel.reports import Overdue, Reports

__all__ = ("Ends",)


class Ends:
    """The ends of one connector's transfers; and, apart, of each that it is made of.

    A request may be under way in several connectors, also one after the other: what a
    rank says of it in one never counts in another. Of requests that are over, and of
    failures without an end, only the last ``max_done`` are remembered.
    """

    def __init__(self, max_done: int, whose: str = "") -> None:
        self._max_done = max_done
        self._whose = whose
        self._sending = Reports(f"sending{whose}", max_done=max_done)
        self._receiving = Reports(f"receiving{whose}", max_done=max_done)
        self._failed_sending: dict[str, str] = {}
        self._failed_recving: dict[str, str] = {}
        self._full_sending: dict[str, str] = {}
        self._parts: list[Ends] = []

    @property
    def duplicates(self) -> int:
        """How many reports came again before their request was complete."""
        return sum(reports.duplicates for reports in self._all_reports())

    @property
    def late(self) -> int:
        """How many reports came after their request was complete."""
        return sum(reports.late for reports in self._all_reports())

    @property
    def unfinished(self) -> int:
        """How many transfers some ranks, but not enough, have reported."""
        return sum(len(reports) for reports in self._all_reports())

    def note_failures(self, one: KVConnectorOutput) -> None:
        """Keep what a rank says has failed until its transfer is complete."""
        for number, part in enumerate(one.parts):
            self._part(number).note_failures(part)
        if one.parts:
            return
        for known, reports, failed in (
            (self._failed_sending, self._sending, one.failed_sending),
            (self._failed_recving, self._receiving, one.failed_recving),
            (self._full_sending, self._sending, one.full_sending),
        ):
            for name in failed or ():
                if not reports.is_done(name):
                    known[name] = known.get(name) or one.reasons.get(name, "")
            while len(known) > self._max_done:
                del known[next(iter(known))]

    def take(
        self, rank: int, one: KVConnectorOutput, *, expected: int, now_s: float
    ) -> KVConnectorOutput:
        """Take what a rank says; return what is complete by it."""
        if one.parts:
            parts = [
                self._part(number).take(rank, part, expected=expected, now_s=now_s)
                for number, part in enumerate(one.parts)
            ]
            ended = KVConnectorOutput(parts=tuple(parts))
            for part in parts:
                ended.add_whole(part)
            return ended
        ended = KVConnectorOutput(invalid_block_ids=set(one.invalid_block_ids))
        ended.finished_sending = {
            name
            for name in one.finished_sending or ()
            if self._sending.add(name, rank, expected=expected, now_s=now_s)
        }
        ended.finished_recving = {
            name
            for name in one.finished_recving or ()
            if self._receiving.add(name, rank, expected=expected, now_s=now_s)
        }
        ended.failed_sending, sent = _taken(
            self._failed_sending, ended.finished_sending
        )
        ended.failed_recving, received = _taken(
            self._failed_recving, ended.finished_recving
        )
        ended.full_sending, _ = _taken(self._full_sending, ended.finished_sending)
        ended.reasons = sent | received
        return ended

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is known of requests, but for what is not complete."""
        ids = set(request_ids)
        for reports, known in (
            (self._sending, self._failed_sending),
            (self._receiving, self._failed_recving),
            (self._sending, self._full_sending),
        ):
            reports.forget(ids)
            for request_id in ids:
                if not reports.is_open(request_id):
                    known.pop(request_id, None)
        for part in self._parts:
            part.forget(ids)

    def overdue(
        self, *, world_size: int, now_s: float, deadline_s: float
    ) -> Iterator[Overdue]:
        """Yield what is past the deadline, and which ranks are missing."""
        for reports in self._all_reports():
            yield from reports.overdue(
                world_size=world_size, now_s=now_s, deadline_s=deadline_s
            )

    def _all_reports(self) -> Iterator[Reports]:
        yield self._sending
        yield self._receiving
        for part in self._parts:
            yield from part._all_reports()

    def _part(self, number: int) -> Ends:
        while len(self._parts) <= number:
            whose = f"{self._whose} by connector {len(self._parts)}"
            self._parts.append(Ends(self._max_done, whose))
        return self._parts[number]


def _taken(known: dict[str, str], ended: set[str]) -> tuple[set[str], dict[str, str]]:
    """Return which of what ended had failed, and why; it is forgotten."""
    why = {name: known.pop(name) for name in ended & known.keys()}
    return set(why), {name: reason for name, reason in why.items() if reason}

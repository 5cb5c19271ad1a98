"""What all workers say of their transfers, as one: for the scheduler, once a step.

A request has ended when all ranks have reported it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol, Self, TypeVar

from asynckv.types import as_count, as_timeout

__all__ = (
    "Ends",
    "Foldable",
    "HasFinishedCount",
    "HasKVOutput",
    "KVConnectorOutput",
    "KVOutputAggregator",
    "Overdue",
    "Reports",
)


_ENDS: Final = (
    "finished_sending",
    "failed_sending",
    "full_sending",
    "finished_recving",
    "failed_recving",
)


class Foldable(Protocol):
    """Statistics, or whatever else of several workers can be made one of."""

    def aggregate(self, other: Self, /) -> Self:
        """Return both as one."""
        ...


@dataclasses.dataclass(slots=True)
class KVConnectorOutput:
    """Transfers that ended, by request id. The names are vLLM's.

    A failed receive is in ``failed_recving`` and in ``finished_recving``, a failed send
    in ``failed_sending`` and in ``finished_sending``, and in ``full_sending`` too if
    there was no room for it; ``reasons`` says why.
    ``expected_finished_count``, if above 0, is how many workers are to report
    requests that nobody has reported yet. ``parts``, where a connector is made of
    several, says what is whose: the rest is all of them together.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None
    invalid_block_ids: set[int] = dataclasses.field(default_factory=set)
    kv_connector_stats: Foldable | None = None
    kv_connector_worker_meta: Foldable | None = None
    expected_finished_count: int = 0
    failed_sending: set[str] | None = None
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    parts: tuple[KVConnectorOutput, ...] = ()
    full_sending: set[str] | None = None

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.failed_recving
            or self.invalid_block_ids
            or self.kv_connector_stats
            or self.kv_connector_worker_meta
        )

    def add_ends(self, other: KVConnectorOutput) -> None:
        """Take in what ended by ``other`` too, part by part."""
        self.add_whole(other)
        parts = [
            *self.parts,
            *(KVConnectorOutput() for _ in other.parts[len(self.parts) :]),
        ]
        for mine, theirs in zip(parts, other.parts, strict=False):
            mine.add_ends(theirs)
        self.parts = tuple(parts)

    def add_whole(self, other: KVConnectorOutput) -> None:
        """The same, but for whose it is."""
        for field in _ENDS:
            if theirs := getattr(other, field):
                setattr(self, field, (getattr(self, field) or set()) | theirs)
        self.invalid_block_ids |= other.invalid_block_ids
        self.reasons |= other.reasons


class HasKVOutput(Protocol):
    """One worker's whole output of a step: its transfers are one attribute of it."""

    kv_connector_output: KVConnectorOutput | None


@dataclasses.dataclass(frozen=True, slots=True)
class Overdue:
    """A request that some ranks have reported, and others should have by now.

    ``missing`` are those that have not; ``needed`` more reports make it complete.
    """

    request_id: str
    direction: str
    reported: tuple[int, ...]
    missing: tuple[int, ...]
    needed: int
    waited_s: float

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.missing))
        return (
            f"{self.direction} of request {self.request_id!r} lacks {self.needed} "
            f"of ranks {ranks} after {self.waited_s:.0f} s"
        )


@dataclasses.dataclass(slots=True)
class _Open:
    expected: int
    since_s: float
    ranks: set[int] = dataclasses.field(default_factory=set)


class Reports:
    """Counts each rank once a request, and remembers which requests are complete.

    What is reported again, before completion or after, changes nothing but the
    counters ``duplicates`` and ``late``. Of complete requests the last ``max_done`` are
    remembered, or until :meth:`forget`.
    """

    def __init__(self, direction: str, *, max_done: int) -> None:
        self.direction = direction
        self.duplicates = 0
        self.late = 0
        self._max_done = max_done
        self._open: dict[str, _Open] = {}
        self._done: dict[str, None] = {}

    def __len__(self) -> int:
        """How many requests some ranks, but not enough, have reported."""
        return len(self._open)

    def add(self, request_id: str, rank: int, *, expected: int, now_s: float) -> bool:
        """Note a report; return whether it made the request complete.

        ``expected`` is for a request that nobody has reported yet.
        """
        if request_id in self._done:
            self.late += 1
            return False
        found = self._open.setdefault(request_id, _Open(expected, now_s))
        if rank in found.ranks:
            self.duplicates += 1
            return False
        found.ranks.add(rank)
        if len(found.ranks) < found.expected:
            return False
        del self._open[request_id]
        self._done[request_id] = None
        if len(self._done) > self._max_done:
            del self._done[next(iter(self._done))]
        return True

    def is_done(self, request_id: str) -> bool:
        """Whether the request is complete, as far as is remembered."""
        return request_id in self._done

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are over, or begin again: what is reported now is new.

        But what only some ranks have reported stays: the others still will, of this
        transfer, whatever has begun under the same id.
        """
        for request_id in request_ids:
            self._done.pop(request_id, None)

    def is_open(self, request_id: str) -> bool:
        """Whether some ranks, but not enough, have reported the request."""
        return request_id in self._open

    def overdue(
        self, *, world_size: int, now_s: float, deadline_s: float
    ) -> Iterator[Overdue]:
        """Yield what was first reported ``deadline_s`` ago and is not complete."""
        for request_id, found in self._open.items():
            # First reported, first in the dict.
            if (waited_s := now_s - found.since_s) < deadline_s:
                return
            missing = tuple(
                rank for rank in range(world_size) if rank not in found.ranks
            )
            yield Overdue(
                request_id,
                self.direction,
                tuple(sorted(found.ranks)),
                missing,
                found.expected - len(found.ranks),
                waited_s,
            )


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


_logger = logging.getLogger(__name__)

_MAX_DONE: Final = 16 * 1024
_FOLDED: Final = ("kv_connector_stats", "kv_connector_worker_meta")

_Output = TypeVar("_Output", bound=HasKVOutput)


class HasFinishedCount(Protocol):
    """A connector that knows how many workers report each request."""

    def get_finished_count(self) -> int | None:
        """Return how many, or ``None`` if all do."""
        ...


class KVOutputAggregator:
    """Emits a request when as many ranks as expected have reported it, each once.

    A rank that reports twice is counted once, also after the request was emitted:
    call :meth:`forget` when a request is over, or when its transfer begins again
    under the same id. A failed transfer is emitted with the finished one, not before,
    with the first reason that a rank gave. Of requests that are over, and of failures
    without an end, only the last 16384 are remembered. Where a connector is made of
    several each one's ends are counted apart, and come out in ``parts``: in the whole
    a request is named once for each of them.
    What a step brings is never lost: without an output of the chosen rank it is kept
    for the next step that has one.

    A request that is not complete ``deadline_s`` after its first report is logged once,
    with the ranks that are missing; it stays open, for they may still touch its blocks.

    :raises ValueError: the count is not at least 1, or ``deadline_s`` is no time
    :raises TypeError: one of them is no number
    """

    def __init__(
        self,
        expected_finished_count: int,
        *,
        deadline_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.expected_finished_count = as_count(
            expected_finished_count, "expected_finished_count"
        )
        self.deadline_s = as_timeout(deadline_s, "deadline_s")
        self._clock = clock
        self._world_size = 0
        self._ends = Ends(_MAX_DONE)
        self._logged: set[tuple[str, str]] = set()
        self._held = KVConnectorOutput()

    @classmethod
    def from_connector(
        cls,
        connector: HasFinishedCount,
        world_size: int,
        *,
        deadline_s: float = 300.0,
    ) -> KVOutputAggregator:
        """Return one that expects as many reports as the connector says, or all.

        :raises ValueError: the connector says more than there are workers
        """
        count = connector.get_finished_count() or world_size
        if count > world_size:
            raise ValueError(f"{count} of {world_size} workers can never report")
        return cls(count, deadline_s=deadline_s)

    @property
    def duplicates(self) -> int:
        """How many reports came again before their request was complete."""
        return self._ends.duplicates

    @property
    def late(self) -> int:
        """How many reports came after their request was complete."""
        return self._ends.late

    @property
    def unfinished(self) -> int:
        """How many transfers some ranks, but not enough, have reported."""
        return self._ends.unfinished

    def aggregate(
        self, outputs: Sequence[_Output | None], output_rank: int = 0
    ) -> _Output | None:
        """Take what each rank says; return the chosen rank's output with the result.

        Its ``kv_connector_output`` is replaced; sets without members are ``None``
        there. ``None`` if that rank has no output: the result comes with the next.

        :raises TypeError: statistics of two ranks are of different types; nothing was
            taken then
        :raises Exception: what their ``aggregate`` raises; what ended is kept for the
            next step, and only statistics are lost
        :raises IndexError: there is no rank ``output_rank``
        """
        chosen = outputs[output_rank]
        said = [
            None if output is None else output.kv_connector_output for output in outputs
        ]
        for field in _FOLDED:
            self._check_types(field, said)
        self._world_size = max(self._world_size, len(outputs))
        told = [(rank, one) for rank, one in enumerate(said) if one is not None]
        for _, one in told:
            self._ends.note_failures(one)
        for rank, one in told:
            self._expect(one.expected_finished_count)
            ended = self._ends.take(
                rank, one, expected=self.expected_finished_count, now_s=self._clock()
            )
            self._held.add_ends(ended)
        self._log_overdue()
        for _, one in told:
            self._fold(one)
        if chosen is None:
            return None
        chosen.kv_connector_output, self._held = self._held, KVConnectorOutput()
        return chosen

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are over, or begin again: what is reported now is new.

        What only some ranks have reported stays: the others still will, of this
        transfer, and none of it may count for another one of the same id.
        """
        self._ends.forget(request_ids)

    def overdue(self) -> list[Overdue]:
        """Return what is past the deadline, and which ranks are missing."""
        found = self._ends.overdue(
            world_size=self._world_size,
            now_s=self._clock(),
            deadline_s=self.deadline_s,
        )
        return list(found)

    def _fold(self, one: KVConnectorOutput) -> None:
        held = self._held
        for field in _FOLDED:
            mine: Foldable | None = getattr(held, field)
            theirs: Foldable | None = getattr(one, field)
            if theirs is not None:
                folded = theirs if mine is None else mine.aggregate(theirs)
                setattr(held, field, folded)

    def _expect(self, count: int) -> None:
        """Let a worker say how many are to report what nobody has reported yet."""
        if count <= 0 or count == self.expected_finished_count:
            return
        if count > self._world_size:
            _logger.warning(
                "a worker expects %d reports of each request; there are %d workers",
                count,
                self._world_size,
            )
            count = self._world_size
        self.expected_finished_count = count

    def _check_types(
        self, field: str, said: Sequence[KVConnectorOutput | None]
    ) -> None:
        known: type | None = None
        for one in (self._held, *said):
            value = one and getattr(one, field)
            if value is None:
                continue
            if known not in (None, type(value)):
                raise TypeError(
                    f"{field} of one rank is a {known.__name__}, "
                    f"of another a {type(value).__name__}"
                )
            known = type(value)

    def _log_overdue(self) -> None:
        overdue = {(late.direction, late.request_id): late for late in self.overdue()}
        for key, late in overdue.items():
            if key not in self._logged:
                _logger.warning("%s", late)
        self._logged = set(overdue)

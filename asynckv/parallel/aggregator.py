"""What all workers say of their transfers, as one: for the scheduler, once a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeVar

from asynckv.parallel.ends import Ends
from asynckv.parallel.outputs import Foldable, HasKVOutput, KVConnectorOutput
from asynckv.parallel.reports import Overdue

__all__ = ("HasFinishedCount", "KVOutputAggregator")

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

    :raises ValueError: the count is not at least 1
    """

    def __init__(
        self,
        expected_finished_count: int,
        *,
        deadline_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if expected_finished_count < 1:
            raise ValueError(f"expected_finished_count={expected_finished_count}")
        self.expected_finished_count = expected_finished_count
        self.deadline_s = deadline_s
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

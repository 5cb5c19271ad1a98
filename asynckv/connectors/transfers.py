"""A request's state in a connector: which transfers are under way, and what is told.

For each (request, direction) there is one state at a time, and its end is told exactly
once; whatever else is said of it is only counted. That ledger is pure: no clock, no
loop, no tensor. A worker has a task for each transfer; of what it says of their ends
the scheduler side believes what it has ordered.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal, TypeAlias

from asynckv.abc import BlockIds, KVTransferResults
from asynckv.observability.lines import as_line
from asynckv.parallel.aggregator import KVConnectorOutput
from asynckv.waits.waiting import wait_shielded

__all__ = (
    "ExpectedLoads",
    "Phase",
    "TransferCounters",
    "TransferLedger",
    "TransferState",
    "Transfers",
    "Way",
    "output_of",
    "reason_of",
    "results_of",
)


Way: TypeAlias = Literal["send", "recv"]

_REMEMBERED: Final = 4096
"""Ended ones of which it is still known that they were here."""


class Phase(enum.Enum):
    """Where a transfer is in its state."""

    MOVING = "moving"
    """Issued. Memory may be read or written by it."""
    STOPPING = "stopping"
    """Cancelled; memory is not quiet yet."""
    DONE = "done"
    """Everything arrived; nobody was told yet."""
    FAILED = "failed"
    """Ended without that, and memory is quiet; nobody was told yet."""
    TOLD = "told"
    """Over."""


@dataclasses.dataclass(eq=False, slots=True)
class TransferState:
    """One transfer of one request. Whoever moves its bytes keeps it as a token.

    With ``lacks_room`` it failed as there was no room where it would have been kept.
    """

    request_id: str
    way: Way
    block_ids: BlockIds = ()
    phase: Phase = Phase.MOVING
    reason: str = ""
    is_cancelled: bool = False
    lacks_room: bool = False

    @property
    def is_over(self) -> bool:
        """Whether memory is quiet."""
        return self.phase not in (Phase.MOVING, Phase.STOPPING)


@dataclasses.dataclass(slots=True)
class TransferCounters:
    """What was said of transfers, and what of it did not count."""

    begun: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    late: int = 0
    duplicate: int = 0
    unknown: int = 0


class TransferLedger:
    """Every transfer of one side, by request and direction.

    Nothing here raises for what a peer or an engine says too late, twice or of
    somebody unknown: it is counted.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._states: dict[tuple[str, Way], TransferState] = {}
        self._ended: collections.OrderedDict[tuple[str, Way], None] = (
            collections.OrderedDict()
        )
        self._remembered = remembered
        self._unreported: list[TransferState] = []
        self.counters = TransferCounters()

    def __len__(self) -> int:
        """How many are not told yet."""
        return len(self._states)

    def begin(
        self, request_id: str, way: Way, block_ids: BlockIds = ()
    ) -> TransferState | None:
        """A transfer is issued; ``None``, and counted, if one is under way already."""
        name = (request_id, way)
        if name in self._states:
            self.counters.duplicate += 1
            return None
        self._ended.pop(name, None)
        state = self._states[name] = TransferState(request_id, way, block_ids)
        self.counters.begun += 1
        return state

    def find(self, request_id: str, way: Way) -> TransferState | None:
        """Return the transfer that is not told yet, if there is one."""
        return self._states.get((request_id, way))

    def cancel(self, request_id: str, way: Way) -> TransferState | None:
        """Nobody wants it any more: return what has to be stopped, if anything has."""
        state = self._find_or_count(request_id, way)
        if state is None or state.phase is not Phase.MOVING:
            return None
        state.phase, state.is_cancelled = Phase.STOPPING, True
        self.counters.cancelled += 1
        return state

    def settle(self, state: TransferState, reason: str = "") -> bool:
        """A transfer has ended and its memory is quiet: done, or why it failed.

        One that was cancelled has failed, even if all of it had arrived. ``False``, and
        counted, if it was over before.
        """
        if self._states.get((state.request_id, state.way)) is not state:
            self.counters.late += 1
            return False
        if state.is_over:
            self.counters.duplicate += 1
            return False
        if state.phase is Phase.STOPPING:
            reason = reason or "cancelled"
        state.phase = Phase.FAILED if reason else Phase.DONE
        state.reason = reason
        self.counters.failed += bool(reason)
        self.counters.done += not reason
        self._unreported.append(state)
        return True

    def settle_by_id(
        self, request_id: str, way: Way, reason: str = ""
    ) -> TransferState | None:
        """Somebody else says that a transfer has ended: whose it is, if it counts."""
        state = self._find_or_count(request_id, way)
        return state if state is not None and self.settle(state, reason) else None

    def take_unreported(self) -> list[TransferState]:
        """Return what has ended since the last call, once. They are forgotten."""
        told, self._unreported = self._unreported, []
        for state in told:
            state.phase = Phase.TOLD
            name = (state.request_id, state.way)
            del self._states[name]
            self._ended[name] = None
        while len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
        return told

    def _find_or_count(self, request_id: str, way: Way) -> TransferState | None:
        state = self.find(request_id, way)
        if state is None:
            was_here = (request_id, way) in self._ended
            self.counters.late += was_here
            self.counters.unknown += not was_here
        return state


class ExpectedLoads:
    """Each load that was ordered ends once; what else workers say is only counted."""

    def __init__(self) -> None:
        self._ledger = TransferLedger()
        self.counters = self._ledger.counters
        """What was said of them, and what of it did not count."""
        self._aborts: list[str] = []

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._ledger)

    def are_free(self, request_id: str) -> bool:
        """Whether no older request of that id has a load that was aborted, and goes on.

        Until then its blocks are held, and whose an end is could not be told.
        """
        state = self._ledger.find(request_id, "recv")
        return state is None or state.phase is not Phase.STOPPING

    @property
    def has_aborts(self) -> bool:
        """Whether there is something for :meth:`take_aborts`."""
        return bool(self._aborts)

    def begin(self, request_id: str, block_ids: BlockIds) -> TransferState | None:
        """A load is ordered; ``None``, and counted, if the request has one."""
        return self._ledger.begin(request_id, "recv", block_ids)

    def abort(self, request_id: str) -> bool:
        """Nobody waits for it; ``True``: its blocks must stay until it has ended."""
        if self._ledger.cancel(request_id, "recv") is None:
            return False
        self._aborts.append(request_id)
        return True

    def take_aborts(self) -> tuple[str, ...]:
        """Return what the workers have to be told, once."""
        aborts, self._aborts = self._aborts, []
        return tuple(aborts)

    def settle(self, results: KVTransferResults) -> KVTransferResults:
        """Take what the workers say; return the ends that count, each once."""
        for request_id in results.finished_recving:
            is_failed = request_id in results.failed_recving
            why = results.reasons.get(request_id) or "the load failed"
            self._ledger.settle_by_id(request_id, "recv", why if is_failed else "")
        # What else the workers name may be somebody else's by now.
        return _take_results(self._ledger)

    def clear(self) -> None:
        """Tell the workers nothing more."""
        self._aborts.clear()


def _take_results(ledger: TransferLedger) -> KVTransferResults:
    """Return what has ended since the last call, once."""
    states = ledger.take_unreported()
    if not states:
        return KVTransferResults()
    sent = [state for state in states if state.way == "send"]
    received = [state for state in states if state.way == "recv"]
    failed = [state for state in received if state.reason]
    blocks = (group for state in failed for group in state.block_ids)
    return KVTransferResults(
        finished_sending=frozenset(state.request_id for state in sent),
        failed_sending=frozenset(state.request_id for state in sent if state.reason),
        finished_recving=frozenset(state.request_id for state in received),
        failed_recving=frozenset(state.request_id for state in failed),
        invalid_block_ids=frozenset[int]().union(*blocks),
        reasons={state.request_id: state.reason for state in states if state.reason},
        full_sending=frozenset(state.request_id for state in sent if state.lacks_room),
    )


logger = logging.getLogger(__name__)


class Transfers:
    """Runs them, and tells each one's end once.

    A transfer's coroutine ends only when no memory is touched by it any more, in
    whatever way it ends.
    """

    def __init__(self) -> None:
        self.ledger = TransferLedger()
        self.counters = self.ledger.counters
        """What was said of them, and what of it did not count."""
        self._tasks: dict[TransferState, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._dispensable: dict[asyncio.Task[None], None] = {}
        self._callbacks: list[Callable[[], None]] = []
        self.is_closing = False
        """Whether nothing may begin any more."""

    def count(self, way: Way) -> int:
        """How many are under way."""
        return sum(state.way == way for state in self._tasks)

    @property
    def others(self) -> int:
        """How many are under way of which nobody is told."""
        return len(self._others)

    def begin(
        self,
        request_id: str,
        way: Way,
        run: Callable[[], Coroutine[Any, Any, None]],
        block_ids: BlockIds = (),
        ended: Callable[[], None] | None = None,
    ) -> TransferState | None:
        """Run a transfer; ``None``, and counted, if the request has one of that way.

        ``ended`` is called when it has ended, also if it had no time to begin. While
        this is closing it is refused: ``None``, and ``ended`` has been called.
        """
        if self.is_closing:
            self.refuse(request_id, way, block_ids, "the connector is closed")
            if ended is not None:
                ended()
            return None
        state = self.ledger.begin(request_id, way, block_ids)
        if state is None:
            return None
        task = asyncio.get_running_loop().create_task(
            run(), name=f"asynckv: {way} {request_id}"
        )
        self._tasks[state] = task
        task.add_done_callback(lambda task: self._ended(state, task))
        if ended is not None:
            task.add_done_callback(lambda _: ended())
        return state

    def refuse(
        self,
        request_id: str,
        way: Way,
        block_ids: BlockIds,
        reason: str,
        *,
        lacks_room: bool = False,
    ) -> None:
        """Tell of a transfer that could not even begin."""
        state = self.ledger.begin(request_id, way, block_ids)
        if state is not None:
            state.lacks_room = lacks_room
            self.ledger.settle(state, reason)
            for callback in self._callbacks:
                callback()

    def begin_unreported(
        self,
        run: Callable[[], Coroutine[Any, Any, None]],
        name: str,
        *,
        at_most: int | None = None,
    ) -> asyncio.Task[None] | None:
        """Run what nobody waits for; that it fails is only logged.

        Where ``at_most`` of those that may be given up are under way the oldest is.
        While this is closing nothing is run: ``None``.
        """
        if self.is_closing:
            return None
        if at_most is not None and len(self._dispensable) >= at_most:
            oldest = next(iter(self._dispensable))
            del self._dispensable[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(run(), name=f"asynckv: {name}")
        self._others.add(task)
        if at_most is not None:
            self._dispensable[task] = None
        task.add_done_callback(self._untold_ended)
        return task

    def cancel(self, request_id: str, way: Way) -> None:
        """End a request's transfer; it is told once its memory is quiet."""
        state = self.ledger.cancel(request_id, way)
        if state is not None:
            self._tasks[state].cancel()

    def fail(
        self, state: TransferState, reason: str, *, lacks_room: bool = False
    ) -> None:
        """End a transfer that can come to nothing any more, and say why."""
        if (task := self._tasks.get(state)) is not None:
            self.ledger.cancel(state.request_id, state.way)
            state.reason, state.lacks_room = reason, lacks_room
            task.cancel()

    def fail_after(
        self,
        state: TransferState,
        timeout_s: float,
        *,
        lacks_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """Give a transfer up that is not over in time. Never waits.

        ``lacks_room`` is asked then whether it still waits for room.
        """
        task = self._tasks.get(state)
        if task is not None:
            reason = f"it took longer than {timeout_s:g} s"

            def give_up() -> None:
                self.fail(state, reason, lacks_room=lacks_room())

            timer = task.get_loop().call_later(timeout_s, give_up)
            task.add_done_callback(lambda _: timer.cancel())

    async def wait_others(self) -> None:
        """Wait for what nobody is told of. A cancelled call leaves no trace."""
        while self._others:
            await asyncio.wait(set(self._others))

    def results(self) -> KVTransferResults:
        """Return what has ended since the last call."""
        return _take_results(self.ledger)

    def call_when_ended(self, callback: Callable[[], None]) -> None:
        """Call back whenever :meth:`results` has something new, or others ended."""
        self._callbacks.append(callback)

    async def aclose(self) -> None:
        """Cancel all of them, and wait until memory is quiet.

        A cancellation is held back until then.
        """
        self.abort()
        ending = asyncio.create_task(self._end(), name="asynckv: end of transfers")
        await wait_shielded(ending)

    def abort(self) -> None:
        """Cancel all of them, and begin no others of that kind. Never waits."""
        self.is_closing = True
        for state in self._tasks:
            self.ledger.cancel(state.request_id, state.way)
        for task in (*self._tasks.values(), *self._others):
            task.cancel()

    async def _end(self) -> None:
        while tasks := [*self._tasks.values(), *self._others]:
            await asyncio.wait(tasks)

    def _ended(self, state: TransferState, task: asyncio.Task[None]) -> None:
        del self._tasks[state]
        self.ledger.settle(state, state.reason or _reason(task))
        for callback in self._callbacks:
            callback()

    def _untold_ended(self, task: asyncio.Task[None]) -> None:
        self._others.discard(task)
        self._dispensable.pop(task, None)
        if reason := _reason(task):
            logger.debug("%s: %s", as_line(task.get_name()), as_line(reason))
        for callback in self._callbacks:
            callback()


def _reason(task: asyncio.Task[None]) -> str:
    if task.cancelled():
        return "cancelled"
    exc = task.exception()
    return "" if exc is None else reason_of(exc)


def reason_of(error: BaseException) -> str:
    """Return what is told of an error."""
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


def output_of(results: KVTransferResults) -> KVConnectorOutput:
    """Return what one rank says, for the aggregator."""
    return KVConnectorOutput(
        finished_sending=set(results.finished_sending),
        failed_sending=set(results.failed_sending),
        full_sending=set(results.full_sending),
        finished_recving=set(results.finished_recving),
        failed_recving=set(results.failed_recving),
        invalid_block_ids=set(results.invalid_block_ids),
        reasons=dict(results.reasons),
        parts=tuple(map(output_of, results.parts)),
    )


def results_of(output: KVConnectorOutput) -> KVTransferResults:
    """Return what all ranks say, for ``update_connector_output``."""
    return KVTransferResults(
        finished_sending=frozenset(output.finished_sending or ()),
        failed_sending=frozenset(output.failed_sending or ()),
        full_sending=frozenset(output.full_sending or ()),
        finished_recving=frozenset(output.finished_recving or ()),
        failed_recving=frozenset(output.failed_recving or ()),
        invalid_block_ids=frozenset(output.invalid_block_ids),
        reasons=dict(output.reasons),
        parts=tuple(map(results_of, output.parts)),
    )

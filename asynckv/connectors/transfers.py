"""The transfers of one worker: a task for each, and a ledger of how they ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from asynckv.abc import KVTransferResults
from asynckv.connectors.lifecycle import Life, TransferCounters, TransferLedger, Way
from asynckv.observability.lines import as_line
from asynckv.shielding import wait_shielded

__all__ = ("Transfers", "reason_of")

logger = logging.getLogger(__name__)


class Transfers:
    """Runs them, and tells each one's end once.

    A transfer's coroutine ends only when no memory is touched by it any more, in
    whatever way it ends.
    """

    def __init__(self) -> None:
        self.ledger = TransferLedger()
        self._tasks: dict[Life, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._dispensable: dict[asyncio.Task[None], None] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._is_closing = False

    @property
    def is_closing(self) -> bool:
        """Whether nothing may begin any more."""
        return self._is_closing

    @property
    def counters(self) -> TransferCounters:
        """What was said of them, and what of it did not count."""
        return self.ledger.counters

    def count(self, way: Way) -> int:
        """How many are under way."""
        return sum(life.way == way for life in self._tasks)

    @property
    def others(self) -> int:
        """How many are under way of which nobody is told."""
        return len(self._others)

    def begin(
        self,
        request_id: str,
        way: Way,
        run: Callable[[], Coroutine[Any, Any, None]],
        block_ids: Iterable[int] = (),
        ended: Callable[[], None] | None = None,
    ) -> Life | None:
        """Run a transfer; ``None``, and counted, if the request has one of that way.

        ``ended`` is called when it has ended, also if it had no time to begin.
        """
        life = self.ledger.begin(request_id, way, frozenset(block_ids))
        if life is None:
            return None
        task = asyncio.get_running_loop().create_task(
            run(), name=f"asynckv: {way} {request_id}"
        )
        self._tasks[life] = task
        task.add_done_callback(lambda task: self._ended(life, task))
        if ended is not None:
            task.add_done_callback(lambda _: ended())
        return life

    def refuse(
        self,
        request_id: str,
        way: Way,
        block_ids: Iterable[int],
        reason: str,
        *,
        lacks_room: bool = False,
    ) -> None:
        """Tell of a transfer that could not even begin."""
        life = self.ledger.begin(request_id, way, frozenset(block_ids))
        if life is not None:
            life.lacks_room = lacks_room
            self.ledger.settle(life, reason)
            for callback in self._callbacks:
                callback()

    def begin_untold(
        self,
        run: Callable[[], Coroutine[Any, Any, None]],
        name: str,
        *,
        at_most: int | None = None,
    ) -> None:
        """Run what nobody waits for; that it fails is only logged.

        Where ``at_most`` of those that may be given up are under way the oldest is.
        """
        if self._is_closing:
            return
        if at_most is not None and len(self._dispensable) >= at_most:
            oldest = next(iter(self._dispensable))
            del self._dispensable[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(run(), name=f"asynckv: {name}")
        self._others.add(task)
        if at_most is not None:
            self._dispensable[task] = None
        task.add_done_callback(self._untold_ended)

    def cancel(self, request_id: str, way: Way) -> None:
        """End a request's transfer; it is told once its memory is quiet."""
        life = self.ledger.cancel(request_id, way)
        if life is not None:
            self._tasks[life].cancel()

    def fail(self, life: Life, reason: str, *, lacks_room: bool = False) -> None:
        """End a transfer that can come to nothing any more, and say why."""
        if (task := self._tasks.get(life)) is not None:
            self.ledger.cancel(life.request_id, life.way)
            life.reason, life.lacks_room = reason, lacks_room
            task.cancel()

    def fail_after(
        self,
        life: Life,
        timeout_s: float,
        *,
        lacks_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """Give a transfer up that is not over in time. Never waits.

        ``lacks_room`` is asked then whether it still waits for room.
        """
        task = self._tasks.get(life)
        if task is not None:
            reason = f"it took longer than {timeout_s:g} s"

            def give_up() -> None:
                self.fail(life, reason, lacks_room=lacks_room())

            timer = task.get_loop().call_later(timeout_s, give_up)
            task.add_done_callback(lambda _: timer.cancel())

    async def wait_others(self) -> None:
        """Wait for what nobody is told of. A cancelled call leaves no trace."""
        while self._others:
            await asyncio.wait(set(self._others))

    def results(self) -> KVTransferResults:
        """Return what has ended since the last call."""
        lives = self.ledger.take_untold()
        if not lives:
            return KVTransferResults()
        sent = [life for life in lives if life.way == "send"]
        received = [life for life in lives if life.way == "recv"]
        failed = [life for life in received if life.reason]
        return KVTransferResults(
            finished_sending=frozenset(life.request_id for life in sent),
            failed_sending=frozenset(life.request_id for life in sent if life.reason),
            finished_recving=frozenset(life.request_id for life in received),
            failed_recving=frozenset(life.request_id for life in failed),
            invalid_block_ids=frozenset[int]().union(*(f.block_ids for f in failed)),
            reasons={life.request_id: life.reason for life in lives if life.reason},
            full_sending=frozenset(life.request_id for life in sent if life.lacks_room),
        )

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
        self._is_closing = True
        for life in self._tasks:
            self.ledger.cancel(life.request_id, life.way)
        for task in (*self._tasks.values(), *self._others):
            task.cancel()

    async def _end(self) -> None:
        while tasks := [*self._tasks.values(), *self._others]:
            await asyncio.wait(tasks)

    def _ended(self, life: Life, task: asyncio.Task[None]) -> None:
        del self._tasks[life]
        self.ledger.settle(life, life.reason or _reason(task))
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
    if exc is None:
        return ""
    return reason_of(exc)


def reason_of(error: BaseException) -> str:
    """Return what is told of an error."""
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name

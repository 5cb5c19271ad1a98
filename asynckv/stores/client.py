"""One tier in use: asked while it answers, told of changes behind everybody's back.

Its calls run in tasks of this object's. One that is late is waited for no more, and
runs on: what its items lend to it stays lent until it ends. Loads go before stores.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from asynckv.abc import (
    StoreTier,
    TierFacts,
    TierPrefix,
    TierResult,
    TierValue,
    WantedValue,
)
from asynckv.errors import ConfigError
from asynckv.observability.latencies import LatencyHistogram
from asynckv.stores.clearings import TierClearing
from asynckv.stores.health import (
    Moving,
    Quarantine,
    TierCall,
    TierHealth,
    TierStatistics,
)
from asynckv.stores.known import KnownKeys
from asynckv.stores.write_behind import TierChange, WriteBehind
from asynckv.waits.waiting import OwnTasks, Watchers, in_turns

__all__ = ("TierClient", "Written", "closing")

logger = logging.getLogger(__name__)

_KEYS_AT_ONCE: Final = 1024
_QUESTIONS_AT_ONCE: Final = 4
_CHANGES_AT_ONCE: Final = 16
_BYTES_AT_ONCE: Final = 32 * 2**20
_OPEN_S, _PROBE_S = 30.0, 5.0
"""So long an answer to a probe is waited for."""
_ABSENT_S: Final = 0.5
_AFTER_LOADS_S: Final = 0.1
"""So long a store waits for loads that are under way."""
_LEAST_TICK_S: Final = 0.001
_RETRY_S: Final = 1.0
_RESTS: Final = 30
"""A clearing that has failed is tried again after so many times what it took."""
_CLOSE_S: Final = 1.0


class Written(Protocol):
    """A value that a tier is to have, held until it is let go."""

    def tier_value(self, key: str) -> TierValue:
        """Return what is written."""


W = TypeVar("W", bound=Written)
T = TypeVar("T")


class TierClient(Generic[W]):
    """``tier`` as the store sees it: it never fails, it only does not have things.

    ``write_bytes`` of values may wait to be written there; ``release`` lets one go.
    """

    def __init__(
        self,
        name: str,
        tier: StoreTier,
        quarantine: Quarantine,
        write_bytes: int,
        release: Callable[[W], None],
    ) -> None:
        self.name = name
        self.tier = tier
        self.facts = TierFacts()
        self.hits = self.misses = self.failed = self.refused = self.corrupt = 0
        self._fetch_times, self._store_times = LatencyHistogram(), LatencyHistogram()
        self._quarantine = quarantine
        quarantine.changed.append(self._lent)
        self._release = release
        self.behind: WriteBehind[W] = WriteBehind(write_bytes, release)
        """What the tier is still to be told, and what of it is void."""
        self._loads = TierHealth(self.facts.patience_s)
        self._stores = TierHealth(self.facts.patience_s)
        self._known = KnownKeys(missing_s=_ABSENT_S)
        self._tasks = OwnTasks()
        self._calls = OwnTasks()
        self._changed = Watchers()
        self._asking = asyncio.Semaphore(_QUESTIONS_AT_ONCE)
        self._questions: list[tuple[Sequence[str], asyncio.Future[set[str]]]] = []
        self._probing: asyncio.Task[None] | None = None
        self._told: TierFacts | Exception = self.facts
        self._late: dict[TierCall, asyncio.Future[None]] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._dropping: asyncio.Handle | None = None
        self._again: dict[str, asyncio.TimerHandle] = {}
        """By prefix: what is to be cleared again; with none, what is to be deleted."""
        self._has_given_up = self._has_miscounted = self._has_refused = False
        self._is_silent = self._is_closed = False

    async def open(self) -> None:
        """See what the tier is like, and begin to write to it.

        One that is not there is probed in the background.

        :raises ConfigError: it cannot be used as it was configured
        """
        self._loop = asyncio.get_running_loop()
        try:
            facts = await self._ask_facts(_OPEN_S)
        except ConfigError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever an engine does is a miss
            logger.warning("%s is not there: %s", self.name, exc)
            self._loads.open(self._loop.time())
            self._stores.open(self._loop.time())
        else:
            self._take_facts(facts)
        self._tasks.start(self._write_forever, f"writer to {self.name}")
        self._tasks.start(self._clear_forever, f"clearing of {self.name}")
        self._tasks.start(self._probe_forever, f"probe of {self.name}")

    def may_have(self, key: str) -> bool:
        """Is it worth asking for ``key``? Never waits."""
        if self._is_refusing:
            self.refused += 1
            return False
        return self._known.is_there(key, self._loop.time()) is not False

    @property
    def _is_refusing(self) -> bool:
        return self._loads.is_open or self._quarantine.is_full or self._is_closed

    def contains(self, keys: Sequence[str]) -> asyncio.Future[set[str]]:
        """Say which are there, as new as they should be, as far as is known.

        What is asked in one turn of the loop is put to the tier together.
        """
        asked = [key for key in keys if self.behind.may_be_new(key)]
        if self._is_refusing:
            self.refused += len(asked)
            asked = []
        elif len(self._known):
            is_there, now_s = self._known.is_there, self._loop.time()
            asked = [key for key in asked if is_there(key, now_s) is not False]
        there: asyncio.Future[set[str]] = self._loop.create_future()
        self._questions.append((asked, there))
        if len(self._questions) == 1:
            self._calls.start(self._ask, f"questions to {self.name}")
        return there

    async def _ask(self) -> None:
        questions, self._questions = self._questions, []
        asked = [key for keys, _ in questions for key in keys]
        there: set[str] = set()
        # More of them would be taken for calls that are late.
        for start in range(0, len(asked), _KEYS_AT_ONCE):
            async with self._asking:
                if self._loads.is_open or self._is_closed:
                    break
                some = asked[start : start + _KEYS_AT_ONCE]
                contains = partial(_results, self.tier.contains, some)
                results = await self._call(self._loads, contains)
            told = zip(some, results or (), strict=False)
            there.update(key for key, one in told if one is TierResult.DONE)
        for keys, asking in questions:
            if not asking.done():
                asking.set_result(there.intersection(keys))

    async def fetch(
        self, wanted: Sequence[WantedValue], ended: Callable[[], None]
    ) -> Sequence[TierResult]:
        """Read what there is of ``wanted``; of what comes too late nothing is.

        ``ended`` is called when nothing writes to their memory any more: before this
        returns, or later.
        """
        began_s = time.perf_counter()
        questions = [self._known.ask(one.key) for one in wanted]
        fetch = partial(_results, self.tier.fetch, wanted)
        results = await self._call(self._loads, fetch, wanted, lambda results: ended())
        self._fetch_times.observe(time.perf_counter() - began_s)
        if results is None:
            results = [TierResult.FAILED] * len(wanted)
        else:
            self.hits += results.count(TierResult.DONE)
            self.misses += results.count(TierResult.MISSING)
            self.failed += results.count(TierResult.FAILED)
        now_s = self._loop.time()
        for one, question, result in zip(wanted, questions, results, strict=True):
            is_absent = result is TierResult.MISSING and not self.facts.is_local
            left_s = 0.0 if is_absent else None
            self._known.answer(one.key, question, left_s, now_s)
        return results

    def touch(self, keys: Sequence[str]) -> None:
        """They are in use. Never waits."""
        if keys:
            self._calls.start(partial(self._touch, keys), f"touch in {self.name}")

    async def _touch(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            if self._loads.is_open or self._is_closed:
                break
            some = keys[start : start + _KEYS_AT_ONCE]

            async def touch(some: Sequence[str] = some) -> Sequence[TierResult]:
                await self.tier.touch(some)
                return ()

            await self._call(self._loads, touch)

    def write(
        self, key: str, epoch: int, value: W, nbytes: int, identity: object
    ) -> bool:
        """Write a value soon; ``False``: it is dropped. Never waits."""
        self._known.begin_change(key)
        if not (self._can_store and self.fits(nbytes)):
            self.behind.skip(key, epoch, identity)
            self._release(value)
            return False
        is_taken = self.behind.write(key, epoch, value, nbytes, identity)
        self._changed.wake()
        return is_taken

    def note(self, key: str, epoch: int, identity: object) -> None:
        """A key has a new value, which is not to be written yet. Never waits."""
        self._known.begin_change(key)
        self.behind.note(key, epoch, identity)
        self._changed.wake()

    def delete(self, key: str, epoch: int) -> None:
        """Delete a key soon. Never waits."""
        self._known.begin_change(key)
        self.behind.delete(key, epoch)
        self._changed.wake()

    def clear(self, prefix: str, epoch: int) -> None:
        """Delete all keys that begin so, soon. Never waits."""
        lost = self.behind.clearings.clear(prefix, epoch)
        if lost is not None and not self._has_given_up:
            self._has_given_up = True
            logger.warning(
                "%s has too much to clear: what it has of %s stays there, hidden",
                *(self.name, lost),
            )
        self._changed.wake()

    async def flush(self, epoch: float = math.inf) -> None:
        """Wait until changes up to ``epoch`` are made, or came to nothing.

        A cancelled call leaves no trace.
        """
        while self.behind.is_behind(epoch) and self._can_store:
            await self._changed.next_change(self._loop)

    def fits(self, nbytes: int) -> bool:
        """Does the tier take values of so many bytes?"""
        most = self.facts.max_value_nbytes
        return most is None or nbytes <= most

    @property
    def takes_writes(self) -> bool:
        """Does it answer, and is there room for what waits?"""
        return self._can_store and not self.behind.is_full

    @property
    def _can_store(self) -> bool:
        return not (self._stores.is_open or self._quarantine.is_full or self._is_closed)

    def statistics(self) -> TierStatistics:
        """Return counters and gauges. Never waits."""
        return TierStatistics(
            is_loading=not self._loads.is_open,
            is_storing=not self._stores.is_open,
            hits=self.hits,
            misses=self.misses,
            failed=self.failed + self._loads.failed,
            refused=self.refused,
            late=self._loads.late + self._stores.late,
            corrupt=self.corrupt,
            accepted=self.behind.accepted,
            dropped=self.behind.dropped,
            unwritten=self.behind.failed,
            waiting=len(self.behind),
            waiting_bytes=self.behind.nbytes,
            fetch_latencies=self._fetch_times.latencies(),
            store_latencies=self._store_times.latencies(),
            counts=self._counts(),
        )

    def _counts(self) -> Mapping[str, float]:
        try:
            return dict(self.tier.counts())
        except Exception:  # whatever the code of others raises
            if not self._has_miscounted:
                self._has_miscounted = True
                logger.exception("%s does not tell what it has counted", self.name)
            return {}

    async def aclose(self) -> None:
        """Close it. A call that does not end is left to itself after a second."""
        self._stop()
        await self._tasks.quiesce()

        async def close() -> None:
            with closing(self.tier):
                await self.tier.aclose()

        ending = self._calls.start(close, f"end of {self.name}")
        await asyncio.wait({ending}, timeout=_CLOSE_S)
        if not ending.done():
            logger.warning("%s does not end; it is left to itself", self.name)
        for _ in self.behind.close():
            await asyncio.sleep(0)

    def abort(self) -> None:
        """Close it now. Never waits."""
        self._stop()
        with closing(self.tier):
            self.tier.abort()

    def _stop(self) -> None:
        self._is_closed = True
        in_turns(self.behind.close())
        self._tasks.cancel()
        for timer in (self._watch, *self._again.values()):
            if timer is not None:
                timer.cancel()
        for late in self._late.values():
            if not late.done():
                late.set_result(None)
        self._changed.wake()

    async def _call(
        self,
        health: TierHealth,
        make: Callable[[], Awaitable[Sequence[TierResult]]],
        items: Sequence[Moving] = (),
        ended: Callable[[Sequence[TierResult] | None], None] = lambda results: None,
    ) -> Sequence[TierResult] | None:
        """Make a call, and return what came of it; ``None``: it failed, or was late.

        ``ended`` is called with that when the call is over, however late that is. Bytes
        of ``items`` move, if any do. A cancelled wait leaves the call to itself, as a
        late one.
        """
        found: list[Sequence[TierResult] | None] = []
        call = health.begin(items, self._loop.time())
        late = self._late[call] = self._loop.create_future()
        self._look_soon()

        async def run() -> None:
            results = None
            try:
                results = await make()
            except Exception:
                logger.debug("a call of %s failed", self.name, exc_info=True)
            finally:
                found.append(results)
                self._ended(health, call, results)
                ended(results)
                self._changed.wake()

        task = self._calls.start(run, f"call of {self.name}")
        try:
            await asyncio.wait({task, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._late[call]
            if not task.done():
                self._leave(health, call, task)
        return found[0] if found else None

    def _ended(
        self, health: TierHealth, call: TierCall, results: Sequence[TierResult] | None
    ) -> None:
        worked = any(one is not TierResult.FAILED for one in results or ())
        moved = sum(item.moved_nbytes for item in call.items)
        has_failed = not worked and (results is None or len(results) > 0)
        if worked and not call.is_late:
            health.worked()
        health.end(call, moved, self._loop.time(), failed=has_failed)
        self._drop_if_away()

    def _leave(
        self, health: TierHealth, call: TierCall, task: asyncio.Task[None]
    ) -> None:
        """Nobody waits for a call any more; what its items were lent stays lent."""
        if not call.is_late:
            health.leave(call)
        lent = sum(item.lent_nbytes for item in call.items)
        self._quarantine.lend(lent)
        task.add_done_callback(lambda task: self._quarantine.lend(-lent))

    def _lent(self) -> None:
        self._drop_if_away()
        self._changed.wake()

    def _look_soon(self) -> None:
        if self._watch is None and (self._loads.calls or self._stores.calls):
            in_s = min(self._loads.look_in_s(), self._stores.look_in_s())
            self._watch = self._loop.call_later(max(in_s, _LEAST_TICK_S), self._look)

    def _look(self) -> None:
        """Wait no more for calls that are late."""
        self._watch = None
        for health in (self._loads, self._stores):
            for call in health.look(self._loop.time()):
                self._late[call].set_result(None)
                if not self._is_silent:
                    self._is_silent = True
                    logger.warning(
                        "%s is silent: it is asked again once it answers", self.name
                    )
        self._drop_if_away()
        self._look_soon()
        self._changed.wake()

    def _drop_if_away(self) -> None:
        """What waits for a tier that is not written to keeps memory from others."""
        if self._dropping is None:
            self._drop_some()

    def _drop_some(self) -> None:
        self._dropping = None
        if not (self._is_closed or self._can_store) and self.behind.drop_writes():
            self._dropping = self._loop.call_soon(self._drop_some)

    async def _write_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AFTER_LOADS_S):
                    while self._loads.calls:
                        await self._changed.next_change(self._loop)
            most = _CHANGES_AT_ONCE, _BYTES_AT_ONCE
            # Not before that: what is taken has to be told, or stays taken.
            changes = self._can_store and self.behind.take(*most)
            if changes:
                await self._tell(changes)
            else:
                await self._changed.next_change(self._loop)

    async def _tell(self, changes: Sequence[TierChange[W]]) -> None:
        def ended(results: Sequence[TierResult] | None) -> None:
            told = results or [TierResult.FAILED] * len(changes)
            for change, result in zip(changes, told, strict=True):
                is_done = result is TierResult.DONE
                self.behind.ended(change, is_done=is_done)
                if change.is_delete and not is_done:
                    self._try_later("", _RETRY_S)

        if changes[0].is_delete:
            keys = [change.key for change in changes]
            delete = partial(_results, self.tier.delete, keys)
            await self._call(self._stores, delete, ended=ended)
        else:
            values = [
                one.value.tier_value(one.key)
                for one in changes
                if one.value is not None
            ]
            began_s = time.perf_counter()
            store = partial(_results, self.tier.store, values)
            await self._call(self._stores, store, values, ended)
            self._store_times.observe(time.perf_counter() - began_s)
        for change in changes:
            change.is_late = True  # or has ended

    async def _clear_forever(self) -> None:
        while True:
            if self.behind.forget_cleared():
                await asyncio.sleep(0)
                continue
            can_tell = not self._stores.is_open
            clearing = self.behind.take_clearing() if can_tell else None
            if clearing is None:
                await self._changed.next_change(self._loop)
            else:
                await self._tell_clearing(clearing)

    async def _tell_clearing(self, clearing: TierClearing) -> None:
        prefix, began_s = TierPrefix(clearing.prefix), self._loop.time()

        async def clear() -> Sequence[TierResult]:
            return [await self.tier.clear(prefix)]

        def ended(results: Sequence[TierResult] | None) -> None:
            (result,) = results or (TierResult.FAILED,)
            self.behind.clearings.ended(clearing, result)
            if result is TierResult.FAILED:
                took_s = self._loop.time() - began_s
                self._try_later(prefix.prefix, max(_RETRY_S, _RESTS * took_s))
            elif result is TierResult.REFUSED:
                logger.warning("%s cannot delete all of a model: it stays", self.name)

        await self._call(self._stores, clear, [prefix], ended)
        self.behind.clearings.late(clearing)
        self._changed.wake()

    def _try_later(self, prefix: str, after_s: float) -> None:
        if prefix not in self._again and not self._is_closed:
            self._again[prefix] = self._loop.call_later(after_s, self._try_now, prefix)

    def _try_now(self, *prefixes: str) -> None:
        for prefix in prefixes:
            self._again.pop(prefix).cancel()
            if prefix:
                self.behind.clearings.retry(prefix)
            elif self.behind.retry():
                self._try_later("", _RETRY_S)
        self._changed.wake()

    async def _probe_forever(self) -> None:
        while True:
            now_s = self._loop.time()
            due = [one.probe_due_s(now_s) for one in (self._loads, self._stores)]
            waits = [one for one in due if one is not None]
            if not waits:
                await self._changed.next_change(self._loop)
            elif min(waits) > 0:
                await asyncio.sleep(min(waits))
            else:
                await self._probe()

    async def _probe(self) -> None:
        """See if it is there again."""
        facts = None
        with contextlib.suppress(Exception):
            facts = await self._ask_facts(_PROBE_S)
        if isinstance(self._told, ConfigError) and not self._has_refused:
            self._has_refused = True
            logger.warning("%s cannot be used: %s", self.name, self._told)
        for health in (self._loads, self._stores):
            if health.probe_due_s(self._loop.time()) == 0:
                health.probed(self._loop.time(), is_there=facts is not None)
        if facts is not None:
            self._take_facts(facts)
            self._known = KnownKeys(missing_s=_ABSENT_S)
            self._try_now(*self._again)
            self._is_silent = False
            logger.info("%s is there again", self.name)

    async def _ask_facts(self, timeout_s: float) -> TierFacts:
        """Probe it. One probe at a time, however long that takes; its answer counts.

        :raises Exception: what it raises; TimeoutError: there is no answer yet
        """
        if self._probing is None:
            self._told = TimeoutError("it does not answer")

            async def run() -> None:
                try:
                    self._told = await self.tier.probe()
                except Exception as exc:  # noqa: BLE001 - whoever waits is told
                    self._told = exc

            self._probing = self._calls.start(run, f"probe of {self.name}")
        await asyncio.wait({self._probing}, timeout=timeout_s)
        self._probing = None if self._probing.done() else self._probing
        if isinstance(self._told, Exception):
            raise self._told
        return self._told

    def _take_facts(self, facts: TierFacts) -> None:
        self.facts = facts
        self.behind.deletes_old = facts.is_local
        for health in (self._loads, self._stores):
            health.patience_s = facts.patience_s


async def _results(
    call: Callable[[Sequence[T]], Awaitable[Sequence[TierResult]]], items: Sequence[T]
) -> Sequence[TierResult]:
    """Make a call of a tier. If it has not one result an item, it has failed."""
    results = list(await call(items))
    if len(results) != len(items):
        raise ValueError(f"{len(results)} results of {len(items)} items")
    return results


@contextlib.contextmanager
def closing(tier: StoreTier) -> Iterator[None]:
    """Go on whatever the tier raises while it is closed."""
    try:
        yield
    except Exception:
        logger.exception("%s does not close as it should", type(tier).__name__)

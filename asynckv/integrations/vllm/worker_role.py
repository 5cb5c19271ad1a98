"""What the connector of a vLLM worker does: the engine's thread, beside the loop.

A step that moves nothing costs a few comparisons. A step that does wakes the loop once,
with all that it is to do, and goes on; what has ended comes back by the bridge's queue.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from typing import Any, Final

import torch

from asynckv.abc import (
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorWorker,
    KVTransferResults,
    SupportsHandshake,
    SupportsHeldBlocks,
    SupportsLayerwise,
    SupportsStreams,
)
from asynckv.connectors.transfers import reason_of
from asynckv.errors import GPUFailed
from asynckv.integrations.bridge import Bridge
from asynckv.integrations.vllm.counts import gauges_of, saved_by

__all__ = ("WorkerRole",)

logger = logging.getLogger("vllm.asynckv")  # vLLM shows only what is below "vllm"

_START_S: Final = 30.0
_LOOK_EVERY_S: Final = 1.0
_NOTHING: Final = KVTransferResults()
_NOBODY: Final = frozenset[str]()

_MOVED: Final = ("loaded_bytes", "saved_bytes", "saved_blocks", "unsaved_blocks")
"""What grows in the statistics of workers; none has all of it."""


class WorkerRole:
    """Lets a :class:`~asynckv.abc.KVConnectorWorker` work on a loop of its own.

    ``make`` is called on that loop, once the caches are known. ``reports_saves``: each
    save's end is reported, and blocks are held until then. Else :meth:`wait_released`
    waits until they are copied. ``longest_save_s`` is longer than any save lasts that
    does not hang.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], KVConnectorWorker],
        *,
        reports_saves: bool = True,
        longest_save_s: float = 60.0,
    ) -> None:
        self._make = make
        self._longest_save_s = longest_save_s
        self._reports_saves = reports_saves
        self._bridge = Bridge[KVTransferResults](name)
        self.handshake: KVConnectorHandshake | None = None
        """What the scheduler's role must know of this rank."""
        self._driver: _Driver | None = None
        self._orders: KVConnectorMetadata | None = None
        self._saved = _NOBODY
        # Of this step, what the loop was not told yet.
        self._parts: list[Callable[[], None]] = []
        self._steps = 0
        self._is_to_notify = False
        # What the loop saw last, replaced as a whole, and what was told of that: what
        # was moved since the beginning, and what there is now.
        self._moved = self._told_moved = (0,) * len(_MOVED)
        self._gauges: dict[str, int] = {}
        self._told_gauges: dict[str, int] = {}

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Mapping[str, int],
    ) -> None:
        """Take the caches, and be there for peers when it returns.

        :raises ConfigError: an address that cannot be listened on
        :raises ValueError: caches that cannot be moved
        """
        self._driver = self._bridge.run(
            self._start, kv_caches, groups, timeout_s=_START_S
        )

    def begin_step(self, orders: KVConnectorMetadata | None) -> None:
        """Note what is to be done in this step. Never waits."""
        self._orders = orders
        if orders is not None and self._driver is not None:
            self._saved = saved_by(orders)
            bind = functools.partial(self._driver.bind, orders, self._saved)
            self._parts.append(bind)

    def start_loads(self) -> None:
        """Let the loads of this step be issued, from its end on. Never waits."""
        driver = self._driver
        if self._orders is not None and driver is not None:
            self._parts.append(functools.partial(driver.load, driver.mark()))

    def save_layer(self, layer_name: str) -> None:
        """That layer is computed. Never waits."""
        driver = self._driver
        if self._orders is not None and driver is not None and driver.wants_layers:
            mark = driver.mark()
            self._parts.append(functools.partial(driver.save_layer, layer_name, mark))
            self._hand_over()

    def end_step(self) -> None:
        """The forward is over: what was not saved by layers can be."""
        orders, self._orders = self._orders, None
        driver = self._driver
        if orders is not None and driver is not None:
            self._steps += 1
            if self._saved:
                driver.reading[self._steps] = self._saved
            self._parts.append(
                functools.partial(driver.end, driver.mark(), self._steps)
            )
            self._hand_over()

    def results(self) -> KVTransferResults:
        """Return what has ended since the last call. Never waits."""
        news = self._bridge.news()
        return functools.reduce(operator.or_, news) if news else _NOTHING

    def take_counts(self) -> dict[str, Any] | None:
        """Return what was counted since the last call, if anything was."""
        moved, before = self._moved, self._told_moved
        gauges = self._gauges
        if moved == before and gauges == self._told_gauges:
            return None
        counts: dict[str, Any] = {
            name: now - then
            for name, now, then in zip(_MOVED, moved, before, strict=True)
            if now != then
        }
        if gauges != self._told_gauges:
            counts["gauges"] = {self._bridge.name: gauges}
        self._told_moved, self._told_gauges = moved, gauges
        return counts

    def wait_released(self, request_ids: Set[str]) -> None:
        """Wait until no save of these requests reads its blocks.

        They are about to be overwritten. A save that hangs is given up, so that what
        it has read is never taken for KV: the engine goes on. Returns at once where
        theirs of the steps before have ended.
        """
        driver = self._driver
        if driver is None or not driver.reads(request_ids):
            return
        try:
            self._bridge.run(driver.quiet, request_ids, timeout_s=self._longest_save_s)
        except Exception:  # whatever it is: raised here it would end the engine
            logger.exception("saves are given up that do not end")

    def shutdown(self) -> None:
        """End everything and join the thread. May be called again."""
        self._bridge.shutdown()

    def _hand_over(self) -> None:
        parts, self._parts = self._parts, []
        self._bridge.call(_call_all, parts)

    async def _start(
        self, kv_caches: Mapping[str, torch.Tensor], groups: Mapping[str, int]
    ) -> _Driver:
        worker = self._make()
        worker.register_kv_caches(kv_caches, groups)
        self._bridge.at_end(worker.shutdown)
        await worker.start()
        if isinstance(worker, SupportsHandshake):
            self.handshake = worker.get_handshake_metadata()
        driver = _Driver(worker, self._bridge.tell, reports_saves=self._reports_saves)
        worker.call_when_finished(lambda: self._notify_soon(worker, driver))
        self._bridge.start(driver.run)
        self._bridge.start(self._recheck, worker)
        return driver

    async def _recheck(self, worker: KVConnectorWorker) -> None:
        """Look at what there is, now and then: peers fetch it while nothing ends."""
        while True:
            self._gauges = gauges_of(worker.statistics())
            await asyncio.sleep(_LOOK_EVERY_S)

    def _notify_soon(self, worker: KVConnectorWorker, driver: _Driver) -> None:
        """Tell once of all that ends at one time."""
        if not self._is_to_notify:
            self._is_to_notify = True
            asyncio.get_running_loop().call_soon(self._notify, worker, driver)

    def _notify(self, worker: KVConnectorWorker, driver: _Driver) -> None:
        self._is_to_notify = False
        results = worker.get_finished()
        driver.note_ends(results.finished_sending)
        statistics = worker.statistics()
        self._gauges = gauges_of(statistics)
        self._moved = tuple(int(getattr(statistics, name, 0)) for name in _MOVED)
        if results:
            self._bridge.tell(results)


class _Driver:
    """Takes a worker through its steps in order, on the loop.

    A step need not wait for the saves of the one before: their blocks are held.
    """

    def __init__(
        self,
        worker: KVConnectorWorker,
        tell: Callable[[KVTransferResults], None],
        *,
        reports_saves: bool,
    ) -> None:
        self._worker = worker
        self._notify = tell
        self._streams = worker if isinstance(worker, SupportsStreams) else None
        if self.mark() is None:  # of caches in host memory there never is one
            self._streams = None
        self._reports_saves = reports_saves
        self._parts: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._bound: KVConnectorMetadata | None = None
        self._refused: KVConnectorMetadata | None = None
        # Waits for saves, and whose saves they are; those of the step that was bound.
        self._saving: dict[asyncio.Task[None], frozenset[str]] = {}
        self._saved: frozenset[str] = frozenset()
        # Those whose save has not told its end.
        self._unended: set[str] = set()
        self.reading: dict[int, frozenset[str]] = {}
        """The steps that save something and may read its blocks: added to by the
        engine's thread."""
        self._ends = asyncio.Event()
        self.wants_layers = (
            isinstance(worker, SupportsLayerwise) and worker.wants_layers
        )

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                part = await self._parts.get()
                try:
                    await part()
                except Exception:
                    # One step's fault must not end all the others.
                    logger.exception("a part of a step failed")
        finally:
            for task in self._saving:
                task.cancel()

    def reads(self, request_ids: Set[str]) -> bool:
        """Whether a save of these may still read blocks. In any thread."""
        reading = list(self.reading.values())
        return any(not saved.isdisjoint(request_ids) for saved in reading)

    def bind(self, orders: KVConnectorMetadata, saved: frozenset[str]) -> None:
        """A step begins, which saves these."""
        self._bound = orders

        async def bind() -> None:
            self._saved = saved
            if self._reports_saves:
                self._unended |= self._saved
            try:
                self._worker.bind_connector_metadata(orders)
            except Exception as exc:
                self._refused = orders
                self._unended -= self._saved
                self._notify(_failed_loads(orders, exc))
                self._notify(_failed_saves(orders, exc))
                raise

        self._parts.put_nowait(bind)

    def mark(self) -> object:
        """Mark where the stream of the calling thread is, which is the engine's.

        Never waits, nor raises: by the error each transfer fails, with its reason.
        """
        try:
            return self._streams.mark_stream() if self._streams is not None else None
        except GPUFailed as exc:
            return exc

    def load(self, mark: object) -> None:
        """Its loads can be issued, after ``mark``."""
        orders, self._bound = self._bound, None

        async def load() -> None:
            if orders is None or orders is self._refused:
                return  # then it has been told already
            self._follow(mark)
            try:
                await self._worker.start_load_kv()
            except Exception as exc:
                self._notify(_failed_loads(orders, exc))
                raise

        self._parts.put_nowait(load)

    def save_layer(self, layer_name: str, mark: object) -> None:
        """One layer can be saved, as it is at ``mark``."""

        async def save() -> None:
            self._follow(mark)
            self._worker.save_kv_layer(layer_name)

        self._parts.put_nowait(save)

    def end(self, mark: object, step: int) -> None:
        """All can be saved, as it is at ``mark``, and the step is over."""
        self._parts.put_nowait(functools.partial(self._end, mark, step))

    def note_ends(self, request_ids: Set[str]) -> None:
        """The saves of these requests have ended: they read no block any more."""
        self._unended -= request_ids
        self._ends.set()
        self._ends = asyncio.Event()

    async def quiet(self, request_ids: Set[str]) -> None:
        """Wait until no save of these requests in the steps before reads blocks.

        Cancelled, it gives up those that nobody else gives up.
        """
        done = asyncio.get_running_loop().create_future()

        async def reached() -> None:
            done.set_result(None)

        self._parts.put_nowait(reached)
        await done
        if isinstance(self._worker, SupportsHeldBlocks):
            # And of those saved in the same steps, which are waited for too.
            wanted = request_ids
            for saved in self._saving.values():
                if saved & request_ids:
                    wanted = wanted | saved
            self._worker.let_go_of_blocks(wanted)
        try:
            while saving := [
                task for task, saved in self._saving.items() if saved & request_ids
            ]:
                await asyncio.wait(saving)
        except asyncio.CancelledError:
            if not self._reports_saves:
                for task in self._saving:
                    task.cancel()
            raise

    def _follow(self, mark: object) -> None:
        if self._streams is not None:
            self._streams.follow(mark)

    async def _end(self, mark: object, step: int) -> None:
        try:
            self._follow(mark)
        except GPUFailed:
            self.reading.pop(step, None)  # nothing of it is saved
            raise
        saving = asyncio.create_task(self._wait_for_save(self._saved))
        self._saving[saving] = self._saved
        saving.add_done_callback(functools.partial(self._saved_all, step))
        await asyncio.sleep(0)  # it has begun: it knows of which step it is
        self._worker.clear_connector_metadata()

    def _saved_all(self, step: int, saving: asyncio.Task[None]) -> None:
        del self._saving[saving]
        self.reading.pop(step, None)

    async def _wait_for_save(self, saved: frozenset[str]) -> None:
        try:
            await self._worker.wait_for_save()
        except Exception:
            logger.exception("the wait for the saves of a step failed")
            # It says nothing of their blocks: each save tells its own end.
            while self._unended & saved:
                await self._ends.wait()


def _failed_loads(orders: KVConnectorMetadata, error: Exception) -> KVTransferResults:
    """Say that a step loaded nothing: no request may wait for it for ever."""
    loads = [load for load in getattr(orders, "loads", ()) if load.block_ids]
    names = frozenset(load.request_id for load in loads)
    blocks = [load.block_ids for load in loads]
    return KVTransferResults(
        finished_recving=names,
        failed_recving=names,
        invalid_block_ids=frozenset(
            block for groups in blocks for group in groups for block in group
        ),
        reasons=dict.fromkeys(names, reason_of(error)),
    )


def _failed_saves(orders: KVConnectorMetadata, error: Exception) -> KVTransferResults:
    """Say that a step saved nothing: no blocks may be held for ever."""
    saves = saved_by(orders)
    return KVTransferResults(
        finished_sending=saves,
        failed_sending=saves,
        reasons=dict.fromkeys(saves, reason_of(error)),
    )


def _call_all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()

"""An engine as small as can be: a scheduler, ranks, chunked prefill, aborts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

from asynckv.abc import (
    AsksElsewhere,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorStep,
    KVConnectorWorker,
    KVQuestion,
    KVRequest,
    KVScheduled,
    SupportsHandshake,
    TakesHandshakes,
)
from asynckv.config import KVLoadFailurePolicy
from asynckv.connectors.transfers import output_of, results_of
from asynckv.parallel.aggregator import KVConnectorOutput, KVOutputAggregator
from harness.engines.toy_model import ToyModel
from harness.engines.toy_rank import ToyRank

__all__ = ("ToyEngine", "ToyLoadFailed", "ToyOutput")


class ToyLoadFailed(Exception):
    """The KV of a request could not be loaded, and the policy is to fail it."""


@dataclasses.dataclass(frozen=True)
class ToyOutput:
    """What a request came to. ``external_tokens`` were loaded, not computed."""

    tokens: list[int]
    kv_transfer_params: dict[str, object] | None
    external_tokens: int


@dataclasses.dataclass(eq=False)
class _Running:
    request: KVRequest
    max_tokens: int
    cached_tokens: int
    done: asyncio.Future[ToyOutput]
    look: Callable[[list[int]], None] | None = None
    block_ids: list[int] = dataclasses.field(default_factory=list)
    generated: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    external: int = 0
    is_allocated: bool = False
    is_waiting: bool = False
    is_over: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.request.token_ids, *self.generated]


@dataclasses.dataclass
class _Said:
    kv_connector_output: KVConnectorOutput | None


class ToyEngine:
    """Steps while there is something to do, on the loop, a chunk of a prompt at a time.

    ``async with ToyEngine(...) as engine: await engine.generate(tokens)``. Cancelling
    ``generate`` aborts the request. The tokens it generates depend on every byte of
    the KV in its caches, loaded or computed.
    """

    def __init__(
        self,
        ranks: Sequence[ToyRank],
        scheduler: KVConnectorScheduler | None = None,
        workers: Sequence[KVConnectorWorker] = (),
        *,
        num_blocks: int,
        chunk: int = 64,
        policy: KVLoadFailurePolicy = "recompute",
    ) -> None:
        self.ranks = ranks
        self.scheduler = scheduler
        self.workers = workers
        self.model: ToyModel = ranks[0].model
        self.block_size = ranks[0].shape.block_size
        self.failures: dict[str, str] = {}
        self.unknown_completions = 0
        self._chunk, self._policy = chunk, policy
        self._free = list(range(num_blocks))
        self._num_blocks = num_blocks
        self._requests: dict[str, _Running] = {}
        self._held: dict[str, _Running] = {}
        self._in_step: dict[str, _Running] = {}
        self._wake = asyncio.Event()
        self._changed: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self._aggregator = KVOutputAggregator(max(1, len(workers)))

    @property
    def blocks_in_use(self) -> int:
        """Blocks that are some request's, also an aborted one's that is not quiet."""
        return self._num_blocks - len(self._free)

    async def __aenter__(self) -> Self:
        # Without a connector there are ranks, and no workers.
        for rank, worker in zip(self.ranks, self.workers, strict=False):
            worker.register_kv_caches(rank.caches)
            worker.call_when_finished(self._wake.set)
            await worker.start()
        if isinstance(self.scheduler, AsksElsewhere):
            await self.scheduler.start()
        if isinstance(self.scheduler, TakesHandshakes):
            self.scheduler.set_handshake_metadata(
                {
                    rank: told
                    for rank, worker in enumerate(self.workers)
                    if isinstance(worker, SupportsHandshake)
                    and (told := worker.get_handshake_metadata()) is not None
                }
            )
        self._task = asyncio.create_task(self._run(), name="toy engine")
        self._task.add_done_callback(self._died)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for task in self._asking:
            task.cancel()
        for worker in self.workers:
            await worker.shutdown()
        if self.scheduler is not None:
            self.scheduler.shutdown()
        if isinstance(self.scheduler, AsksElsewhere):
            await self.scheduler.aclose()

    async def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int = 1,
        *,
        request_id: str,
        kv_transfer_params: Mapping[str, object] | None = None,
        cached_tokens: int = 0,
        parent_id: str = "",
        look: Callable[[list[int]], None] | None = None,
    ) -> ToyOutput:
        """Return the tokens that follow; ``cached_tokens`` are computed here anyway.

        ``look`` is called with the request's blocks just before they are given back.

        :raises ToyLoadFailed: its KV could not be loaded, if the policy is ``fail``
        """
        done: asyncio.Future[ToyOutput] = asyncio.get_running_loop().create_future()
        request = KVRequest(
            request_id, tuple(token_ids), kv_transfer_params, parent_id=parent_id
        )
        running = _Running(request, max_tokens, cached_tokens, done, look)
        self._requests[request_id] = running
        if self.scheduler is not None:
            self.scheduler.on_new_request(request)
        self._wake.set()
        try:
            return await done
        finally:
            self._finish(running)

    async def quiet(self) -> None:
        """Wait until nothing is under way here. A cancelled call leaves no trace."""
        while self.blocks_in_use or self._requests or self._held:
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            step = self._schedule()
            self._ask()
            await self._step(step)
            has_more = self.scheduler is not None and self.scheduler.has_pending_work()
            if not step.scheduled and not has_more:
                await self._wake.wait()
            else:
                await asyncio.sleep(0 if step.scheduled else 0.0005)

    def _died(self, task: asyncio.Task[None]) -> None:
        """Let everybody who waits hear of what went wrong here."""
        if not task.cancelled() and (exc := task.exception()) is not None:
            for running in self._requests.values():
                if not running.done.done():
                    running.done.set_exception(exc)

    def _ask(self) -> None:
        """Let what a scheduler wants to know be asked beside the steps."""
        if not isinstance(self.scheduler, AsksElsewhere):
            return
        for question in self.scheduler.take_questions():
            task = asyncio.create_task(self._asked(self.scheduler, question))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _asked(self, scheduler: AsksElsewhere, question: KVQuestion) -> None:
        scheduler.take_answer(await scheduler.ask(question))
        self._wake.set()

    def _schedule(self) -> KVConnectorStep:
        scheduled = []
        self._in_step = {}
        for running in list(self._requests.values()):
            if running.is_over or not (running.is_allocated or self._admit(running)):
                continue
            if running.is_waiting:
                continue
            count = min(self._chunk, len(running.tokens) - running.computed)
            self._in_step[running.request.request_id] = running
            scheduled.append(
                KVScheduled(
                    running.request.request_id,
                    (tuple(running.block_ids),),
                    running.computed,
                    max(0, count),
                )
            )
        return KVConnectorStep(tuple(scheduled))

    def _admit(self, running: _Running) -> bool:
        """Give a request its blocks; some of them may be filled from elsewhere."""
        external: int | None = 0
        is_async = False
        request = running.request
        if self.scheduler is not None:
            external, is_async = self.scheduler.get_num_new_matched_tokens(
                request, running.cached_tokens
            )
        needed = -(-(request.num_tokens + running.max_tokens) // self.block_size)
        if external is None or needed > len(self._free):
            return False  # asked again when an answer, or a block, is there
        running.block_ids = [self._free.pop() for _ in range(needed)]
        running.is_allocated = True
        for rank in self.ranks:
            for layer in self.model.layer_names:
                cached = request.token_ids[: running.cached_tokens]
                rank.write(layer, running.block_ids, cached, 0)
        if self.scheduler is not None:
            blocks = (tuple(running.block_ids),)
            self.scheduler.update_state_after_alloc(request, blocks, external)
        running.external = external
        running.computed = running.cached_tokens + external
        running.is_waiting = is_async and external > 0
        return True

    async def _step(self, step: KVConnectorStep) -> None:
        if self.scheduler is None:
            await self._forward(step, None)
            self._advance(step, self._end_forward())
            return
        metadata = self.scheduler.build_connector_meta(step)
        # As if the ranks were other processes.
        told = msgspec.msgpack.encode(metadata)
        for worker in self.workers:
            copy = msgspec.msgpack.decode(told, type=type(metadata))
            worker.bind_connector_metadata(copy)
            await worker.start_load_kv()
        await self._forward(step, metadata)
        computed = self._end_forward()
        told_by = [worker.get_finished() for worker in self.workers]
        said = [_Said(output_of(results)) for results in told_by]
        for worker in self.workers:
            worker.clear_connector_metadata()
        if (all_said := self._aggregator.aggregate(said)) is not None:
            self._take(all_said.kv_connector_output or KVConnectorOutput())
        self._advance(step, computed)

    async def _forward(
        self, step: KVConnectorStep, metadata: KVConnectorMetadata | None
    ) -> None:
        for layer in self.model.layer_names:
            for worker in self.workers:
                await worker.wait_for_layer_load(layer)
            for scheduled in step.scheduled:
                self._compute(scheduled, layer)
            for worker in self.workers:
                worker.save_kv_layer(layer)
            await asyncio.sleep(0)
        for worker in self.workers:
            await worker.wait_for_save()

    def _compute(self, scheduled: KVScheduled, layer: str) -> None:
        # Also of a request that was aborted meanwhile: its save goes on.
        running = self._in_step[scheduled.request_id]
        if not scheduled.num_scheduled_tokens:
            return
        start = scheduled.num_computed_tokens
        tokens = running.tokens[: start + scheduled.num_scheduled_tokens]
        for rank in self.ranks:
            rank.write(layer, scheduled.block_ids[0], tokens, start)

    def _end_forward(self) -> dict[str, _Running]:
        """Return what was computed; blocks of what ended meanwhile are free now."""
        computed, self._in_step = self._in_step, {}
        for running in computed.values():
            if running.is_over and running not in self._held.values():
                self._give_back(running)
        return computed

    def _advance(self, step: KVConnectorStep, computed: Mapping[str, _Running]) -> None:
        for scheduled in step.scheduled:
            running = computed[scheduled.request_id]
            if running.is_over or running.is_waiting:
                continue
            running.computed += scheduled.num_scheduled_tokens
            if running.computed < len(running.tokens):
                continue
            sums: dict[tuple[int, int], int] = {}
            for rank in self.ranks:
                sums |= rank.sums(running.block_ids, running.computed)
            running.generated.append(self.model.next_token(list(sums.values())))
            if len(running.generated) == running.max_tokens:
                if running.look is not None:
                    running.look(running.block_ids)
                self._finish(running)

    def _take(self, said: KVConnectorOutput) -> None:
        if self.scheduler is None:
            return
        results = self.scheduler.update_connector_output(results_of(said))
        for request_id in results.finished_recving:
            self._wake.set()  # it was set before this step, perhaps, and cleared
            if (held := self._held.pop(request_id, None)) is not None:
                self._give_back(held)
                continue
            running = self._requests.get(request_id)
            if running is None or not running.is_waiting:
                self.unknown_completions += 1
                continue
            running.is_waiting = False
            if request_id in results.failed_recving:
                self._fail(running, results.reasons.get(request_id, ""))

    def _fail(self, running: _Running, reason: str) -> None:
        self.failures[running.request.request_id] = reason
        running.computed, running.external = running.cached_tokens, 0
        if self._policy == "fail":
            if not running.done.done():
                running.done.set_exception(ToyLoadFailed(reason))
            self._finish(running)

    def _finish(self, running: _Running) -> None:
        if running.is_over:
            return
        running.is_over = True
        request_id = running.request.request_id
        del self._requests[request_id]
        is_held, params = False, None
        if self.scheduler is not None:
            blocks = (tuple(running.block_ids),)
            request = msgspec.structs.replace(
                running.request, is_aborted=running.done.done()
            )
            is_held, params = self.scheduler.request_finished(request, blocks)
        if is_held:
            self._held[request_id] = running
        elif running not in self._in_step.values():
            self._give_back(running)
        if not running.done.done():
            output = ToyOutput(running.generated, params, running.external)
            running.done.set_result(output)
        self._wake.set()

    def _give_back(self, running: _Running) -> None:
        self._aggregator.forget([running.request.request_id])
        self._free.extend(running.block_ids)
        running.block_ids = []
        self._wake.set()
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

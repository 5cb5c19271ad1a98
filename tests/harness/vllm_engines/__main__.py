"""One engine, told by lines of JSON what to do, and stepping as long as it has to.

``python -m harness.vllm_engines OPTIONS``: the engine is inside this
process, as with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, so that a kill kills all of it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any, Final, TextIO

from asynckv.abc import KVTransferResults
from harness.vllm_engines.times import StepTimes
from harness.vllm_engines.witness import BlockWitness

__all__ = ("main",)

_COUNT_S: Final = 10.0


class _Process:
    """Takes orders from ``stdin`` and answers at ``out``."""

    def __init__(self, engine: Any, out: TextIO) -> None:
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._out = out
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._has_executed = False
        self._take_step = self._core.step_fn
        self._core.step_fn = self._note_step
        self._times = StepTimes()
        self._witness: BlockWitness | None = None
        self._lied_of: set[str] = set()
        threading.Thread(target=self._read, daemon=True).start()

    def run(self) -> None:
        """Until ``stdin`` ends."""
        self._notify(ready=True)
        while True:
            is_busy = self._scheduler.has_requests()
            try:
                order = self._orders.get(block=not is_busy)
            except queue.Empty:
                self._step()
                continue
            if order is None:
                return
            getattr(self, f"_do_{order.pop('do')}")(**order)

    def _step(self) -> None:
        self._times.begin_step()
        began = time.perf_counter()
        outputs = self._engine.step()
        self._times.end_step(time.perf_counter() - began, self._has_executed)
        for output in outputs:
            if output.finished:
                self._tell_of(output)
        if not self._has_executed:
            # As vLLM's own loop does, for the sake of other threads.
            threading.Event().wait(0.001)

    def _note_step(self) -> Any:
        outputs, self._has_executed = self._take_step()
        return outputs, self._has_executed

    def _tell_of(self, output: Any) -> None:
        completion = output.outputs[0]
        self._notify(
            id=output.request_id,
            tokens=list(completion.token_ids),
            finish_reason=str(completion.finish_reason),
            cached_tokens=output.num_cached_tokens or 0,
            kv_transfer_params=output.kv_transfer_params,
        )

    def _do_add(
        self,
        id: str,
        tokens: list[int],
        max_tokens: int,
        params: dict[str, Any] | None,
        samples: int,
    ) -> None:
        from vllm import SamplingParams, TokensPrompt

        self._engine.add_request(
            id,
            TokensPrompt(prompt_token_ids=tokens),
            SamplingParams(
                n=samples,
                # vLLM refuses several that are greedy by name.
                temperature=0.0 if samples == 1 else 1.0,
                top_k=1,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
            ),
        )

    def _do_abort(self, id: str) -> None:
        self._engine.abort_request([id])
        self._notify(id=id, finish_reason="abort")

    def _do_state(self) -> None:
        """What must come back to what it was, and vLLM's own metrics."""
        manager = self._scheduler.kv_cache_manager
        metrics = {}
        for metric in self._engine.get_metrics():
            value = getattr(metric, "value", getattr(metric, "count", None))
            if value is not None:
                name = metric.name
                labels = {
                    key: text
                    for key, text in metric.labels.items()
                    if key not in ("engine", "model_name")
                }
                if labels:
                    name += json.dumps(labels, sort_keys=True)
                metrics[name] = value
        self._notify(
            state=True,
            free_blocks=manager.block_pool.get_num_free_blocks(),
            requests=len(self._scheduler.requests),
            staged_saves=self._staged_saves(),
            metrics=metrics,
        )

    def _staged_saves(self) -> int:
        """How many saves went on from a copy, as their blocks were wanted back."""
        from vllm.distributed.kv_transfer import (
            get_kv_transfer_group,
            has_kv_transfer_group,
        )

        if not has_kv_transfer_group():
            return 0
        role = get_kv_transfer_group()._worker

        async def count() -> int:
            told = role._driver._worker.statistics()
            return int(getattr(told, "staged_saves", 0))

        return int(role._bridge.run(count, timeout_s=_COUNT_S))

    def _do_time(self) -> None:
        """Time steps, and what of them the connector takes, from now on."""
        from vllm.distributed.kv_transfer import (
            get_kv_transfer_group,
            has_kv_transfer_group,
        )

        self._times.stop()
        self._times = StepTimes()
        if has_kv_transfer_group():
            for connector in (self._scheduler.connector, get_kv_transfer_group()):
                self._times.watch(connector)

    def _do_times(self) -> None:
        self._times.stop()
        self._notify(times=True, **self._times.report())

    def _do_watch_blocks(self) -> None:
        """Note what blocks hold that are computed or loaded from now on."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        rpc = self._core.model_executor.collective_rpc
        (caches,) = rpc(lambda worker: worker.model_runner.kv_caches)
        self._witness = BlockWitness(
            self._scheduler.connector, get_kv_transfer_group(), caches
        )

    def _do_blocks(self) -> None:
        report = {} if self._witness is None else self._witness.report()
        self._notify(blocks=True, **report)

    def _do_lie(self) -> None:
        """Let the worker say that moves of all have ended, and of some of the past."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._lied_of |= {"nobody", *self._scheduler.requests}
        lie = KVTransferResults(
            finished_sending=frozenset(self._lied_of),
            finished_recving=frozenset(self._lied_of),
        )
        get_kv_transfer_group()._worker._bridge.tell(lie)

    def _read(self) -> None:
        for line in sys.stdin:
            self._orders.put(json.loads(line))
        self._orders.put(None)

    def _notify(self, **values: Any) -> None:
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()


def main() -> None:
    """Make the engine of ``argv[1]``, keyword arguments of ``LLM``, and serve it."""
    # What vLLM prints goes to the log; the answers keep the real stdout.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(**json.loads(sys.argv[1]))
    try:
        _Process(llm.llm_engine, out).run()
    finally:
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()

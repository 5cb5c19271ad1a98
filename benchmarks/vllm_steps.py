"""What a connector costs an engine: its calls of a step, and tokens a second.

With a fake runner: one step's calls of both roles, in microseconds, beside a hop to
another thread's loop and back. And, where vLLM is installed, inside its engine with a
model whose steps are milliseconds: what the calls of a step take, as a part of the same
engine's step without a connector; eight requests decode all the while, and in the
second case eight others come and go through a second engine. In the third eight come
and go with a store: each prompt is saved once, and loaded once.

Then eight requests of 200 tokens are sent together, and 192 tokens of each decoded: in
turns by an engine without a connector, by one whose connector does nothing at all, by
one that has no use for ours, by one that loads all eight prompts, and by one that saves
them in a store.

    PYTHONPATH=tests python -m benchmarks.vllm_steps [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import importlib.util
import itertools
import statistics
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from asynckv import StoreBuffer, serve
from asynckv.abc import KVTransferResults
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.p2p.scheduler import P2PScheduler
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.integrations.bridge import Bridge
from asynckv.integrations.vllm.scheduler_role import SchedulerRole
from asynckv.integrations.vllm.worker_role import WorkerRole
from harness.vllm_engines import (
    Engine,
    Pair,
    free_url,
    make_tiny_model,
    random_prompt,
    transfer,
)

__all__ = ("main",)

_LAYERS: Final = 32
_STEPS: Final = 2000
_DECODING, _IN_FLIGHT = 8, 8
_TOKENS: Final = 600
_SECONDS: Final = 8.0
_LIMITS: Final = {
    "nothing pending": 0.05,
    f"{_IN_FLIGHT} in flight": 0.15,
    f"{_IN_FLIGHT} with a store": 0.05,
}
_NOTHING: Final = {
    "kv_connector": "NothingConnector",
    "kv_connector_module_path": "harness.vllm_engines.nothing",
    "kv_role": "kv_both",
}
_PROMPT_TOKENS, _DECODED_TOKENS = 200, 192
_LEAST_TOKENS: Final = {"idle": 0.98, "loads": 0.9}


class _Request(types.SimpleNamespace):
    """vLLM's request, as far as it is looked at."""

    cache_salt = lora_request = prompt_embeds = None
    status = types.SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    mm_features = ()


class _Runner:
    """Calls both roles of one engine, as vLLM's scheduler and runner do."""

    def __init__(self, folder: Path) -> None:
        config = KVTransferConfig(
            kv_connector="P2PConnector",
            engine_id="runner",
            kv_role="kv_both",
            kv_connector_extra_config={
                "listen": f"unix://{folder}/socket",
                "peers": {"runner": f"unix://{folder}/socket"},
                "direction": "pull",
                "layerwise": False,
            },
        )
        engine = KVEngine(engine_id="runner", block_size=32, holds_saved_blocks=True)
        self.scheduler: Any = SchedulerRole(
            P2PScheduler(config, engine), sees_all=False
        )
        self.worker = WorkerRole("runner", lambda: P2PWorker(config, engine))
        names = [f"layer{number}" for number in range(_LAYERS)]
        self._caches = {name: torch.zeros(512, 2, 32, 64) for name in names}
        self.worker.register(self._caches, dict.fromkeys(names, 0))
        self._blocks = itertools.count(1)
        self._of: dict[str, list[list[int]]] = {}

    def step(self, output: Any) -> KVTransferResults:
        """Make one step's calls, without a model between them."""
        orders = self.scheduler.orders(output, self._of.__getitem__)
        self.worker.begin_step(orders)
        for name in self._caches:
            self.worker.save_layer(name)
        self.worker.start_loads()
        self.worker.end_step()
        results = self.worker.results()
        self.worker.take_counts()
        if results:
            self.scheduler.apply_results(results, results)
        return results

    def prefill(self, name: str) -> tuple[_Request, Any]:
        """Return a new request of 64 tokens and its one step."""
        request = _Request(
            request_id=name,
            prompt_token_ids=random_prompt(64, seed=next(self._blocks)),
            kv_transfer_params={"do_remote_decode": True},
        )
        self._take_blocks(name)
        self.scheduler.on_new_request(request)
        self.scheduler.matched_tokens(request, 0)
        new = types.SimpleNamespace(req_id=name, num_computed_tokens=0)
        return request, _output({name: 64}, [new])

    def decode(self, name: str, tokens: list[int], params: dict[str, Any]) -> _Request:
        """Let a request wait for what ``params`` say."""
        request = _Request(
            request_id=name, prompt_token_ids=tokens, kv_transfer_params=params
        )
        self._take_blocks(name)
        self.scheduler.on_new_request(request)
        count, _ = self.scheduler.matched_tokens(request, 0)
        self.scheduler.allocated(request, lambda: self._of[name], count)
        return request

    def finish(self, request: _Request) -> dict[str, Any]:
        """End a request, and return what it carries."""
        _, params = self.scheduler.finished(request, self._of.pop(request.request_id))
        return params or {}

    def close(self) -> None:
        """End both roles."""
        self.scheduler.shutdown()
        self.worker.shutdown()

    def _take_blocks(self, name: str) -> None:
        first = 2 * next(self._blocks) % 510
        self._of[name] = [[first, first + 1]]


def _output(scheduled: dict[str, int], new: list[Any]) -> Any:
    cached = types.SimpleNamespace(req_ids=[], num_computed_tokens=[])
    return types.SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        preempted_req_ids=None,
    )


def _hop_us() -> float:
    bridge = Bridge[None]("hop")
    times = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        bridge.run(asyncio.sleep, 0, timeout_s=5)
        times.append(time.perf_counter() - began)
    bridge.shutdown()
    return statistics.median(times) * 1e6


def _idle_us(runner: _Runner) -> float:
    output = _output({}, [])
    times = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        runner.step(output)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def _busy_us(runner: _Runner) -> float:
    """Keep eight on their way from this runner to itself; all their calls count."""
    names = (f"r{number}" for number in itertools.count())
    waiting: dict[str, _Request] = {}
    spent, steps, ended = 0.0, 0, 0
    while ended < 200:
        prefilled: list[tuple[_Request, dict[str, Any]]] = []
        began = time.perf_counter()
        while len(waiting) + len(prefilled) < _IN_FLIGHT:
            request, output = runner.prefill(next(names))
            runner.step(output)
            prefilled.append((request, runner.finish(request)))
            steps += 1
        for request, params in prefilled:
            name = next(names)
            tokens = request.prompt_token_ids
            waiting[name] = runner.decode(name, tokens, params)
        results = runner.step(_output({}, []))
        for name in results.finished_recving:
            runner.finish(waiting.pop(name))
        spent += time.perf_counter() - began
        steps += 1
        ended += len(results.finished_recving)
        threading.Event().wait(0.001)  # where the model would run
    return spent / steps * 1e6


def _fake_runner() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runner = _Runner(Path(folder))
        hop, idle, busy = _hop_us(), _idle_us(runner), _busy_us(runner)
        again = _idle_us(runner)
        runner.close()
    print(f"fake runner, {_LAYERS} layers, microseconds a step (a hop: {hop:.0f})")
    print(f"  nothing pending: {idle:.1f}, after all that again {again:.1f}")
    print(f"  {_IN_FLIGHT} in flight: {busy:.0f}, their own calls included")


@contextlib.contextmanager
def _decoding(engine: Engine) -> Iterator[None]:
    """Eight requests decode all the while, and end soon after."""
    stopping = threading.Event()

    def decode(seed: int) -> None:
        while not stopping.is_set():
            engine.ask(random_prompt(50, seed=seed), max_tokens=_TOKENS)

    with concurrent.futures.ThreadPoolExecutor(_DECODING) as pool:
        for seed in range(_DECODING):
            pool.submit(decode, seed)
        try:
            yield
        finally:
            stopping.set()


def _measured(
    engine: Engine, come_and_go: Callable[[list[int]], object] | None = None
) -> dict[str, Any]:
    """Time an engine's steps while it decodes, and perhaps while eight come and go."""
    stopping = threading.Event()

    def keep_coming(seed: int) -> None:
        for number in itertools.count():
            if stopping.is_set() or come_and_go is None:
                return
            come_and_go(random_prompt(100, seed=seed + 1000 * number))

    with _decoding(engine), concurrent.futures.ThreadPoolExecutor(_IN_FLIGHT) as pool:
        threading.Event().wait(2)
        if come_and_go is not None:
            for _ in range(_IN_FLIGHT):
                pool.submit(keep_coming, next(_seeds))
            threading.Event().wait(1)
        engine.tell("time")
        threading.Event().wait(_SECONDS)
        times = engine.report("times")
        stopping.set()
    return times


_seeds = itertools.count(10)


@contextlib.contextmanager
def _store() -> Iterator[str]:
    """Serve a store from a thread of this process, which does little else."""
    url, bridge = free_url(), Bridge[None]("store")
    buffer = StoreBuffer("1GiB")
    bridge.enter(lambda: buffer, timeout_s=10)
    bridge.enter(lambda: serve(url, store=buffer), timeout_s=10)
    yield url
    bridge.shutdown()


@contextlib.contextmanager
def _engines() -> Iterator[dict[str, Engine]]:
    options = {"max_num_seqs": 16, "dtype": "float32"}
    url = free_url()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = make_tiny_model(folder / "model")
        store = stack.enter_context(_store())
        # Of the shortest prompts one chunk is stored, and loaded.
        stored = {"mode": "store", "store": store, "chunk_tokens": 64}
        configs = {
            "bare": None,
            "nothing": _NOTHING,
            "idle": transfer("kv_both", listen=free_url()),
            "producer": transfer("kv_producer", listen=url),
            "consumer": transfer("kv_consumer", peers=[url]),
            "store": transfer("kv_both", "recompute", **stored),
        }
        engines = {
            # One after the other: together they may take longer than they may.
            who: stack.enter_context(
                Engine(model, folder / f"{who}.log", config, **options)
            ).wait_ready()
            for who, config in configs.items()
        }
        yield engines


def _real_engines(rounds: int) -> bool:
    with _engines() as engines:
        is_within = _steps(engines, rounds)
        return _tokens(engines, 3 * rounds) and is_within


def _steps(engines: Mapping[str, Engine], rounds: int) -> bool:
    pair, store = Pair(engines["producer"], engines["consumer"]), engines["store"]

    def through_both(prompt: list[int]) -> None:
        pair.ask(prompt, max_tokens=2)

    def twice(prompt: list[int]) -> None:
        store.ask(prompt, max_tokens=2)
        store.ask(prompt, max_tokens=2)

    cases = ((pair.consumer, None), (pair.consumer, through_both), (store, twice))
    parts: dict[str, list[float]] = {case: [] for case in _LIMITS}
    is_within = True
    for _ in range(rounds):
        bare = _measured(engines["bare"])
        for case, (engine, come_and_go) in zip(_LIMITS, cases, strict=True):
            times = _measured(engine, come_and_go)
            part = _part_of(times, bare)
            parts[case].append(part)
            print(f"  {case}: {_described(times, bare)}, {part:.1%}")
    for case, limit in _LIMITS.items():
        part = statistics.median(parts[case])
        is_within &= part <= limit
        print(f"{case}: {part:.1%} of a step, at most {limit:.0%}")
    return is_within


def _tokens(engines: Mapping[str, Engine], rounds: int) -> bool:
    pair = Pair(engines["producer"], engines["consumer"])
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        prompts = [
            random_prompt(_PROMPT_TOKENS, seed=next(_seeds)) for _ in range(_IN_FLIGHT)
        ]
        params = [pair.prefill(prompt) for prompt in prompts]
        none = [None] * len(prompts)
        took = {
            "bare": _decoding_s(engines["bare"], prompts, none),
            "again": _decoding_s(engines["bare"], prompts, none),
            "does nothing": _decoding_s(engines["nothing"], prompts, none),
            "idle": _decoding_s(engines["idle"], prompts, none),
            "loads": _decoding_s(pair.consumer, prompts, params),
            "saves in a store": _decoding_s(engines["store"], prompts, none),
            "loads from it": _decoding_s(engines["store"], prompts, none),
        }
        for name, seconds in took.items():
            found.setdefault(name, []).append(took["bare"] / seconds)
    is_within = True
    print(f"tokens a second, of an engine without a connector, {rounds} rounds")
    for name, ratios in found.items():
        least, middle = _LEAST_TOKENS.get(name, 0.0), statistics.median(ratios)
        is_within &= middle >= least
        print(f"  {name}: {middle:.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return is_within


def _decoding_s(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[Mapping[str, Any] | None],
) -> float:
    began = time.perf_counter()
    requests = [
        engine.add(prompt, max_tokens=_DECODED_TOKENS, params=its)
        for prompt, its in zip(prompts, params, strict=True)
    ]
    for request in requests:
        engine.answer(request)
    return time.perf_counter() - began


def _part_of(times: dict[str, Any], bare: dict[str, Any]) -> float:
    """In CPU seconds: three engines share the cores, and interrupt each other."""
    return float(times["calls_cpu_s"] / max(times["steps"], 1) / bare["step_cpu_s"])


def _described(times: dict[str, Any], bare: dict[str, Any]) -> str:
    steps = max(times["steps"], 1)

    def dearest(column: int) -> str:
        dear = sorted(times["calls"].items(), key=lambda one: -one[1][column])[:4]
        return ", ".join(f"{name} {of[column] / steps * 1e6:.0f}" for name, of in dear)

    return (
        f"{times['calls_cpu_s'] / steps * 1e6:.0f} us of CPU in calls a step "
        f"({dearest(2)}), "
        f"{bare['step_cpu_s'] * 1e3:.2f} ms of CPU a step without a connector; by the "
        f"wall {times['call_s'] * 1e6:.0f} us in the median step, "
        f"{times['calls_s'] / steps * 1e6:.0f} on average ({dearest(1)}), of "
        f"{bare['step_s'] * 1e3:.2f} ms ({steps} steps, {times['idle_steps']} idle)"
    )


def main() -> None:
    """Measure, print, and end with an error where a limit is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    _fake_runner()
    if importlib.util.find_spec("vllm") is None:
        print(
            "vLLM is not installed here: nox -s vllm makes an environment that has it"
        )
    elif not _real_engines(rounds):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Time to first token while what is behind a store breaks, beside computing all of it.

A real vLLM engine shares an ``asynckv serve`` that has a Redis, or a small disk, behind
its memory; another one has no connector. Prompts are asked of both in turns, some at
once and one token of each; a fault comes when the first of all is answered. Half of
them are known to the store. The bar: by the 95th percentile no more than 1.15 of
computing, and one deadline of the connector's: ``lookup_timeout_s`` where the server is
lost, ``fetch_timeout_s`` where what is behind it is.

    PYTHONPATH=tests python -m benchmarks.vllm_faults [--requests 30] [--at-once 6]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import itertools
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from harness.vllm_engines import (
    Engine,
    free_url,
    make_tiny_model,
    random_prompt,
    transfer,
)
from harness.vllm_engines.stores import (
    RedisBehind,
    StoreProcess,
    redis_behind,
    small_disk,
    storing,
)

__all__ = ("main",)

_PROMPT_TOKENS: Final = 900
_CHUNK_TOKENS: Final = 256
_CHUNKS: Final = _PROMPT_TOKENS // _CHUNK_TOKENS
_RATIO: Final = 1.15
_LOOKUP_S, _FETCH_S = 0.25, 2.0
"""What the deadlines are unless somebody says otherwise."""
_SIZE: Final = "256MiB"

_seeds = itertools.count(1)


def _nothing() -> None:
    """No fault."""


_Took: TypeAlias = dict[str, list[float]]


def _ask(
    engine: Engine, prompts: Sequence[list[int]], fault: Callable[[], None]
) -> list[float]:
    """Return the seconds to each first token; those of what fails are left out."""
    first = threading.Event()

    def ask(prompt: list[int]) -> float | None:
        began = time.perf_counter()
        answer = engine.ask(prompt, max_tokens=1)
        took = time.perf_counter() - began
        first.set()
        return took if answer.finish_reason == "length" else None

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        asking = [pool.submit(ask, prompt) for prompt in prompts]
        first.wait()
        fault()
        took = [one.result() for one in asking]
    return [one for one in took if one is not None]


@dataclasses.dataclass(frozen=True)
class _Engines:
    """Both have the same model; one looks for prompts at ``url`` first."""

    computing: Engine
    sharing: Engine
    url: str

    def ask(
        self, groups: Sequence[Sequence[list[int]]], fault: Callable[[], None]
    ) -> _Took:
        """Ask both of each; the fault comes within the first group.

        ``again`` is what computing took a second time: how far equal things differ.
        """
        took: _Took = {"computing": [], "sharing": [], "again": []}
        for number, prompts in enumerate(groups):
            breaks = _nothing if number else fault
            turns = [
                ("computing", self.computing, _nothing),
                ("sharing", self.sharing, breaks),
                ("again", self.computing, _nothing),
            ]
            for name, engine, what in turns[:: -1 if number % 2 else 1]:
                took[name] += _ask(engine, prompts, what)
        return took

    def wait_reachable(self) -> None:
        """Wait until the store that was started is found."""
        until_s = time.monotonic() + 30
        name = "vllm:asynckv_store_reachable"
        # It looks for the store when it is asked.
        self.sharing.ask([5] * (_CHUNK_TOKENS + 1), max_tokens=1)
        while not self.sharing.state()["metrics"].get(name):
            if time.monotonic() > until_s:
                raise TimeoutError("the store is not found")
            self.sharing.ask([5] * 8, max_tokens=1)


@dataclasses.dataclass(frozen=True)
class _Fault:
    """What breaks. ``deadline_s`` is what one request may wait for it."""

    name: str
    deadline_s: float
    breaks: Callable[[StoreProcess, RedisBehind], None]
    disk: str = ""


def _break_nothing(store: StoreProcess, redis: RedisBehind) -> None:
    """As it is."""


_FAULTS: Final = (
    _Fault("nothing", math.inf, _break_nothing),
    _Fault("server killed", _LOOKUP_S, lambda store, redis: store.kill()),
    _Fault("Redis killed", _FETCH_S, lambda store, redis: redis.kill()),
    _Fault("Redis frozen", _FETCH_S, lambda store, redis: redis.freeze()),
    _Fault("disk full", _FETCH_S, _break_nothing, disk="12m"),
)


@contextlib.contextmanager
def _engines(folder: Path, policy: str) -> Iterator[_Engines]:
    model, url = make_tiny_model(folder / "model"), free_url()
    config = transfer("kv_both", policy, mode="store", store=url)
    with (
        Engine(model, folder / "computing.log", dtype="float32") as computing,
        Engine(model, folder / "sharing.log", config, dtype="float32") as sharing,
    ):
        yield _Engines(computing.wait_ready(), sharing.wait_ready(), url)


@contextlib.contextmanager
def _broken(
    engines: _Engines, fault: _Fault, known: list[list[int]]
) -> Iterator[Callable[[], None]]:
    """Let a store know these prompts, most of them below its memory alone."""
    with tempfile.TemporaryDirectory() as name, redis_behind(Path(name)) as redis:
        tier, inside, size = redis.url, tuple[str, ...](), _SIZE
        if fault.disk:
            disk = Path(name) / "disk"
            disk.mkdir()
            tier, inside = f"disk:{disk}?max=1GiB", small_disk(disk, fault.disk)
            size = "16MiB"
        with storing(engines.url, tier, size=size, inside=inside) as store:
            engines.wait_reachable()
            for prompt in known:
                engines.sharing.ask(prompt, max_tokens=1)
            store.wait_for(len(known) * _CHUNKS)
            if not fault.disk:  # a disk of its own is gone with its process
                store.kill()
                store.start()
                engines.wait_reachable()
            yield lambda: fault.breaks(store, redis)


def _measured(engines: _Engines, fault: _Fault, requests: int, at_once: int) -> _Took:
    prompts = [
        random_prompt(_PROMPT_TOKENS, seed=next(_seeds)) for _ in range(requests)
    ]
    groups = [prompts[n : n + at_once] for n in range(0, requests, at_once)]
    with _broken(engines, fault, prompts[::2]) as breaks:
        return engines.ask(groups, breaks)


def _p95(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1]


def _is_within(fault: _Fault, took: _Took, requests: int) -> bool:
    computing, sharing, again = (_p95(one) for one in took.values())
    limit = _RATIO * computing + fault.deadline_s
    is_within = sharing <= limit
    middle = ", ".join(
        f"{name} {_ms(statistics.median(one))}" for name, one in took.items()
    )
    print(
        f"  {fault.name}: p50 {middle}; p95 {_ms(computing)}, {_ms(sharing)} "
        f"({sharing / computing:.2f}), {_ms(again)} ({again / computing:.2f}); longest "
        f"of sharing {_ms(max(took['sharing']))}; {_of_limit(limit)}"
        f"{'' if is_within else ': MISSED'}; "
        f"{requests - len(took['sharing'])} failed",
        flush=True,
    )
    return is_within


def _of_limit(seconds: float) -> str:
    return "no limit" if math.isinf(seconds) else f"limit {_ms(seconds)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def main() -> None:
    """Measure, print, and end with an error where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: nox -s vllm makes an environment with it")
        return
    is_within = True
    for policy in ("fail", "recompute"):
        with tempfile.TemporaryDirectory() as name:
            with _engines(Path(name), policy) as engines:
                print(
                    f"{policy}: {given.requests} requests of {_PROMPT_TOKENS} tokens, "
                    f"{given.at_once} at once"
                )
                for _ in range(given.rounds):
                    for fault in _FAULTS:
                        took = _measured(engines, fault, given.requests, given.at_once)
                        is_within &= _is_within(fault, took, given.requests)
    if not is_within:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""What breaks behind engines that share a store, while requests run.

Nothing of it ends an engine or a request, but one: with ``fail``, who is loading from a
server as that is killed has an error, as vLLM's policy says.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

import asynckv
from harness.redis_servers import PROGRAM
from harness.vllm_engines import (
    Answer,
    Engine,
    StartEngine,
    free_url,
    random_prompt,
    transfer,
)
from harness.vllm_engines.stores import (
    StoreProcess,
    redis_behind,
    small_disk,
    storing,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"there is no {PROGRAM}"),
]

BLOCK = 32
LENGTH = 200
BLOCKS = LENGTH // BLOCK
BLOCK_NBYTES = 2**16
ASKED = 16
KNOWN, ALL = range(ASKED), range(2 * ASKED)
Right: TypeAlias = Mapping[int, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Sharing:
    """An engine that looks for everything in a store at ``url``, and nowhere else."""

    engine: Engine
    url: str
    policy: str

    def wait_reachable(self) -> None:
        """Wait until it has found the store that was started."""
        while not self.metric("store_reachable"):
            self.engine.ask([5] * 8)

    def wait_lost(self) -> None:
        """Wait until it has seen, beside its steps, that the store is gone."""
        while self.metric("store_reachable"):
            threading.Event().wait(0.01)

    def metric(self, name: str) -> int:
        return int(self.engine.state()["metrics"].get(f"vllm:asynckv_{name}", 0))

    def asked(self, seeds: Sequence[int]) -> list[Answer]:
        """Ask all at once."""
        requests = [self.engine.add(prompt_of(seed)) for seed in seeds]
        return [self.engine.answer(one) for one in requests]

    def fill(self, store: StoreProcess, right: Right) -> int:
        """Let what is known be computed, and return how many blocks are stored of it
        behind the store."""
        self.wait_reachable()
        check([self.engine.ask(prompt_of(seed)) for seed in KNOWN], right)
        return store.wait_for(ASKED * BLOCKS)

    def restart(self, store: StoreProcess) -> None:
        """Let the store have nothing but what is behind it."""
        store.kill()
        store.start()
        self.wait_reachable()

    def asked_during(self, fault: Callable[[], None]) -> list[Answer]:
        """Ask all at once; the fault comes when the first one is answered."""
        requests = [self.engine.add(prompt_of(seed)) for seed in ALL]
        first = self.engine.answer(requests[0])
        fault()
        return [first, *(self.engine.answer(one) for one in requests[1:])]

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """It has no place for another request, within the block."""
        others = [self.engine.add([5 + n] * 8, max_tokens=900) for n in range(8)]
        try:
            yield
        finally:
            for one in others:
                self.engine.abort(one)


@pytest.fixture(scope="module", params=["fail", "recompute"])
def sharing(
    start_engine: StartEngine, request: pytest.FixtureRequest
) -> Iterator[Sharing]:
    url, policy = free_url(), request.param
    config = transfer("kv_both", policy, mode="store", store=url, chunk_tokens=BLOCK)
    with start_engine(config, enable_prefix_caching=False) as engine:
        yield Sharing(engine.wait_ready(), url, policy)


@pytest.fixture(scope="module")
def right(alone: Engine) -> Right:
    """What is said to each prompt, by its seed."""
    requests = {seed: alone.add(prompt_of(seed)) for seed in ALL}
    return {seed: alone.answer(one).tokens for seed, one in requests.items()}


def prompt_of(seed: int) -> list[int]:
    return random_prompt(LENGTH, seed=1000 + seed)


def check(answers: Sequence[Answer], right: Right, *, errors: int = 0) -> None:
    """Each has its end, and is right; so many at most have failed."""
    ends = [one.finish_reason for one in answers]
    assert set(ends) <= {"length", "error"}
    assert ends.count("error") <= errors
    for seed, one in enumerate(answers):
        assert one.tokens == right[seed] or one.finish_reason == "error"


def evict_all(url: str) -> None:
    """Put what takes all the memory of a store, twice."""

    async def put() -> None:
        async with asynckv.connect(url, fingerprint="another model") as peer:
            for number in range(32):
                await peer.store.put(f"{number}", torch.zeros(2**18, dtype=torch.uint8))

    asyncio.run(put())


def test_a_server_killed_while_requests_run(
    sharing: Sharing, right: Right, tmp_path: Path
) -> None:
    with redis_behind(tmp_path) as redis, storing(sharing.url, redis.url) as store:
        sharing.fill(store, right)
        failed = sharing.metric("failed_loads")
        answers = sharing.asked_during(store.kill)
        failed = sharing.metric("failed_loads") - failed
        check(answers, right, errors=failed if sharing.policy == "fail" else 0)
        check(sharing.asked(ALL), right)
        store.start()
        sharing.wait_reachable()
        hits = sharing.engine.external_hits()
        check(sharing.asked(KNOWN), right)
        assert sharing.engine.external_hits() > hits
        assert store.count("hits_total")  # it has begun with nothing in memory


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_redis_lost_while_requests_run(
    sharing: Sharing, right: Right, tmp_path: Path, fault: str
) -> None:
    with redis_behind(tmp_path) as redis, storing(sharing.url, redis.url) as store:
        sharing.fill(store, right)
        sharing.restart(store)
        failed = sharing.metric("failed_loads")
        check(sharing.asked_during(getattr(redis, fault)), right)
        check(sharing.asked(ALL), right)
        redis.start() if fault == "kill" else redis.thaw()
        check(sharing.asked(ALL), right)
        assert sharing.metric("failed_loads") == failed


def test_a_disk_that_is_full_while_requests_run(
    sharing: Sharing, right: Right, tmp_path: Path
) -> None:
    tier, inside = f"disk:{tmp_path}?max=1GiB", small_disk(tmp_path)
    if subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    with storing(sharing.url, tier, size="4MiB", inside=inside) as store:
        sharing.wait_reachable()
        failed, hits = sharing.metric("failed_loads"), sharing.engine.external_hits()
        for seeds in (ALL, ALL, range(8), range(8)):
            check(sharing.asked(seeds), right)
        assert store.count("accepted_total") * BLOCK_NBYTES > 6 * 2**20
        assert sharing.engine.external_hits() > hits
        assert sharing.metric("failed_loads") == failed


@pytest.mark.parametrize("what", ["evicted", "killed"])
def test_what_is_lost_between_match_and_load(
    sharing: Sharing, right: Right, tmp_path: Path, what: str
) -> None:
    with (
        redis_behind(tmp_path) as redis,
        storing(sharing.url, redis.url, size="4MiB") as store,
    ):
        sharing.fill(store, right)
        sharing.restart(store)
        failed, hits = sharing.metric("failed_loads"), sharing.engine.external_hits()
        with sharing.full():
            request = sharing.engine.add(prompt_of(0))
            store.wait_until(lambda: store.count("hits_total") >= BLOCKS)
            redis.kill()
            if what == "evicted":
                evict_all(sharing.url)
            else:
                store.kill()
                sharing.wait_lost()
        check([sharing.engine.answer(request)], right)
        loaded = sharing.engine.external_hits() - hits
        assert loaded == (BLOCKS * BLOCK if what == "evicted" else 0)
        assert sharing.metric("failed_loads") == failed


@pytest.mark.parametrize("sharing", ["recompute"], indirect=True)
def test_an_engine_started_cold_finds_what_is_in_redis(
    sharing: Sharing, start_engine: StartEngine, right: Right, tmp_path: Path
) -> None:
    config = transfer(
        "kv_both", sharing.policy, mode="store", store=sharing.url, chunk_tokens=BLOCK
    )
    with (
        redis_behind(tmp_path) as redis,
        storing(sharing.url, redis.url) as store,
        start_engine(config) as cold,
    ):
        stored = sharing.fill(store, right)
        sharing.restart(store)
        cold.wait_ready()
        check([cold.ask(prompt_of(seed)) for seed in KNOWN], right)
        hits = cold.external_hits() // BLOCK
        assert 0 < hits <= store.count("hits_total")
        assert hits == stored or stored < ASKED * BLOCKS

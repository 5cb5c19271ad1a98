"""Engines that know nothing of each other share blocks by way of a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from asynckv import StoreBuffer, serve
from asynckv.integrations.bridge import Bridge
from harness.vllm_engines import (
    StartEngine,
    free_url,
    random_prompt,
    transfer,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

BLOCK = 32


class Shared:
    """A store that this process serves."""

    def __init__(self, bridge: Bridge[None]) -> None:
        self.url = free_url()
        self.buffer = StoreBuffer("64MiB")
        bridge.enter(lambda: self.buffer, timeout_s=10)
        bridge.enter(lambda: serve(self.url, store=self.buffer), timeout_s=10)
        self._bridge = bridge

    def wait_for(self, keys: int) -> None:
        """Wait until so many blocks are stored."""
        deadline = time.monotonic() + 20
        while self._bridge.run(self._count, timeout_s=5) < keys:
            assert time.monotonic() < deadline, "blocks are not stored"
            threading.Event().wait(0.01)

    async def _count(self) -> int:
        return self.buffer.statistics().keys


@pytest.fixture
def shared() -> Iterator[Shared]:
    bridge = Bridge[None]("store")
    yield Shared(bridge)
    bridge.shutdown()


def test_what_one_engine_has_computed_another_need_not(
    start_engine: StartEngine, shared: Shared
) -> None:
    config = transfer("kv_both", "recompute", mode="store", store=shared.url)
    prompt, other = random_prompt(200, seed=1), random_prompt(200, seed=2)
    with (
        start_engine() as alone,
        start_engine(config) as first,
        start_engine(config) as second,
    ):
        for engine in (alone, first, second):
            engine.wait_ready()
        right = alone.ask(prompt).tokens
        assert first.ask(prompt).tokens == right
        assert first.external_hits() == 0
        shared.wait_for(200 // BLOCK)
        assert second.ask(prompt).tokens == right
        assert second.external_hits() == 200 // BLOCK * BLOCK
        assert second.ask(other).tokens == alone.ask(other).tokens
        assert second.external_hits() == 200 // BLOCK * BLOCK

"""What watches vLLM engines, and what they are asked, without any of them."""

from __future__ import annotations

import types
from typing import Any

import torch

from asynckv.connectors.requests import LoadRequest, P2PMetadata
from harness.vllm_engines import (
    random_prompt,
    times,
)
from harness.vllm_engines.engine import VOCABULARY
from harness.vllm_engines.times import StepTimes
from harness.vllm_engines.witness import BlockWitness

CARRIED = {"do_remote_prefill": True, "transfer_id": "t"}


class Connector:
    """Both roles of one: what was said of ``r`` is told next."""

    def __init__(self, *loads: LoadRequest) -> None:
        self.orders = P2PMetadata(loads=loads)
        self.params: dict[str, Any] | None = CARRIED

    def _get_connector_metadata(self) -> Any:
        return types.SimpleNamespace(orders=self.orders)

    def start_load_kv(self, context: object) -> None:
        """As vLLM calls it."""

    def get_transfer_results(self, finished: set[str]) -> Any:
        return types.SimpleNamespace(finished_recving={"r"})

    def request_finished_all_groups(
        self, request: object, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return True, self.params


def _caches() -> list[torch.Tensor]:
    return [torch.rand(4, 2, 3).to(torch.bfloat16) for _ in range(2)]


def _computed(caches: list[torch.Tensor], *block_ids: int) -> list[str]:
    connector = Connector()
    witness = BlockWitness(connector, connector, caches)
    connector.request_finished_all_groups(None, (list(block_ids),))
    digests: list[str] = witness.report()["computed"]["t"]
    return digests


def _loaded(caches: list[torch.Tensor], *block_ids: int, first: int = 0) -> Any:
    connector = Connector(LoadRequest("r", "t", "", (block_ids,), first))
    witness = BlockWitness(connector, connector, caches)
    connector.start_load_kv(None)
    connector.get_transfer_results(set())
    return witness.report()["loaded"]["t"]


def test_equal_blocks_have_equal_digests_wherever_they_lie() -> None:
    theirs, ours = _caches(), _caches()
    for there, here in zip(theirs, ours, strict=True):
        here[[1, 0]] = there[[2, 3]]
    loaded = _loaded(ours, 1, 0, first=5)
    assert loaded == {"first_block": 5, "digests": _computed(theirs, 2, 3)}


def test_one_wrong_bit_in_the_last_layer_is_seen() -> None:
    caches = _caches()
    before = _computed(caches, 1, 2)
    caches[-1].view(torch.int16)[2, 1, 2] ^= 1
    after = _computed(caches, 1, 2)
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_of_requests_that_move_nothing_nothing_is_noted() -> None:
    connector = Connector(LoadRequest("r", "t", "", ()))
    witness = BlockWitness(connector, connector, _caches())
    connector.params = None
    connector.start_load_kv(None)
    connector.request_finished_all_groups(None, ([1],))
    connector.get_transfer_results(set())
    assert witness.report() == {"computed": {}, "loaded": {}}


class Timed:
    """Has every call, and one that makes another."""

    def __getattr__(self, name: str) -> Any:
        if name not in times._CALLS:
            raise AttributeError(name)
        return lambda: name

    def get_transfer_results(self) -> str:
        return str(self.take_events())


def test_calls_belong_to_the_step_that_follows_them_if_it_ran_the_model() -> None:
    timed, connector = StepTimes(), Timed()
    timed.watch(connector)
    assert connector.get_transfer_results() == "take_events"
    for seconds, has_executed in ((0.1, True), (9.0, False), (0.3, True)):
        timed.end_step(seconds, has_executed)
    report = timed.report()
    assert (report["steps"], report["idle_steps"], report["step_s"]) == (2, 1, 0.2)
    assert 0 < report["call_s"] == report["calls_s"] / 2 < 0.05
    calls = report["calls"]
    assert (calls["get_transfer_results"][0], calls["take_events"][0]) == (1, 0)


def test_what_the_clock_takes_is_not_what_a_call_takes() -> None:
    timed, connector = StepTimes(), Timed()
    timed.watch(connector)
    for _ in range(500):
        timed.begin_step()
        connector.take_events()
    report = timed.report()
    count, _, cpu_s = report["calls"]["take_events"]
    assert count == 500
    assert cpu_s / count < report["clock_cpu_s"] / 2


def test_nothing_is_timed_once_it_was_stopped() -> None:
    timed, connector = StepTimes(), Timed()
    timed.watch(connector)
    timed.stop()
    connector.take_events()
    timed.begin_step()
    assert timed.report()["calls"]["take_events"][0] == 0
    StepTimes().watch(connector)


def test_a_prompt_is_the_seeds_own_without_special_tokens() -> None:
    assert random_prompt(50, seed=1) == random_prompt(50, seed=1)
    assert random_prompt(50, seed=1) != random_prompt(50, seed=2)
    assert all(2 < token < VOCABULARY for token in random_prompt(1000, seed=3))

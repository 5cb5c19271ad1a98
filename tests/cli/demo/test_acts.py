from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asynckv.cli.demo.messages import (
    Continue,
    FillBuffer,
    Filled,
    Generated,
    KeptEntry,
    Landed,
    Load,
    Note,
    Order,
    Prefill,
    Prefilled,
    ReadBack,
    Ready,
    Select,
    SelectSlowly,
    SlowlySelected,
    Text,
    WaitReturned,
)
from asynckv.cli.demo.play import ActFailed, Acts
from asynckv.cli.demo.processes import Worker, WorkerEnded

READY = Ready(
    pid=1, url="tcp://here", folder="/m", prompt=(1, 2, 3), second_prompt=(1, 2, 4, 5),
    kv_bytes=10, max_bytes=25, layers=5,
)  # fmt: skip
PREFILLED = Prefilled(2.0, ((1.0, 2.0),) * 5, (1.5,) * 5, 0.01)
GENERATED = Generated(
    landed_s=(2.25,) * 5,
    token_times_s=(2.5,),
    prompt_positions=1,
    attempt=2,
    tokens=(9,),
    worst_lag_s=0.02,
    matched_tokens=2,
)


class FakeWorker(Worker):
    """Answers from a table; dies of an order that it has no answer to."""

    def __init__(self, pid: int, answers: dict[type[Order], Note]) -> None:
        self.asked: list[Order] = []
        self.progress = lambda _: None
        self._pid = pid
        self._answers = answers

    @property
    def pid(self) -> int:
        return self._pid

    async def ask(self, order: Order, answer: type[Any]) -> Any:
        self.asked.append(order)
        if type(order) not in self._answers:
            assert isinstance(order, Select)
            for layer in range(order.dies_after):
                self.progress(Landed(layer))
            raise WorkerEnded
        return self._answers[type(order)]


def prefill_worker(kept: int = 3) -> FakeWorker:
    return FakeWorker(
        1,
        {
            Prefill: PREFILLED,
            FillBuffer: Filled((0.5,), (), 0.03),
            WaitReturned: KeptEntry(3.0, kept),
            ReadBack: Text("words"),
        },
    )


def decode_worker(pid: int = 2) -> FakeWorker:
    ids = tuple(f"demo-slow-{number}" for number in range(6))
    answers: dict[type[Order], Note] = {
        Load: READY,
        Continue: GENERATED,
        Select: GENERATED,
        SelectSlowly: SlowlySelected(ids, 0.04),
    }
    return FakeWorker(pid, answers)


def acts(prefill: FakeWorker) -> Acts:
    """Acts that are always asked for at 0.5 s."""
    return Acts(prefill, READY, lambda: 0.5)


async def test_recomputing_counts_from_when_it_was_asked() -> None:
    recompute = await acts(prefill_worker()).recompute(decode_worker())
    assert recompute.first_token_s == 2.0


async def test_both_sides_of_a_hand_over_are_asked_for_one_entry() -> None:
    prefill, decode = prefill_worker(), decode_worker()
    hand_over = await acts(prefill).hand_over(decode, "bulk")
    assert (hand_over.prefill_s, hand_over.first_token_s) == (1.5, 2.0)
    assert prefill.asked == [Prefill("bulk", "demo-bulk")]
    assert decode.asked == [Select("bulk", "demo-bulk")]


async def test_a_second_request_takes_the_kept_document_and_is_recomputed_too() -> None:
    prefill, decode = prefill_worker(), decode_worker()
    second = await acts(prefill).second_request(decode)
    assert prefill.asked == [Prefill("layerwise", "demo-document", document_only=True)]
    assert decode.asked == [
        Continue(second=True),
        Select("layerwise", "demo-document", second=True),
        Continue(second=True, first_only=True),
    ]
    assert (second.prompt_tokens, second.matched_tokens) == (4, 2)
    assert second.first_token_s == second.recomputed.first_token_s == 2.0


async def test_the_faster_of_two_recomputations_counts() -> None:
    decode = decode_worker()
    asked_s = iter((0.5, 0.5, 2.0))
    playing = Acts(prefill_worker(), READY, lambda: next(asked_s))
    second = await playing.second_request(decode)
    assert (second.first_token_s, second.recomputed.first_token_s) == (2.0, 0.5)


async def test_a_document_whose_kv_is_not_found_fails_the_act() -> None:
    decode = decode_worker()
    decode._answers[Select] = msgspec.structs.replace(GENERATED, matched_tokens=0)
    with pytest.raises(ActFailed, match="not found"):
        await acts(prefill_worker()).second_request(decode)


async def test_the_worst_lag_of_all_acts_is_kept() -> None:
    playing = acts(prefill_worker())
    await playing.hand_over(decode_worker(), "bulk")
    await playing.slow_decoder(decode_worker())
    assert (playing.prefill_lag_s, playing.decode_lag_s) == (0.03, 0.04)


async def test_entries_out_of_order_fail_the_act() -> None:
    decode = decode_worker()
    decode._answers[SelectSlowly] = SlowlySelected(("other",), 0.0)
    with pytest.raises(ActFailed, match="order"):
        await acts(prefill_worker()).slow_decoder(decode)


async def test_the_decoder_is_killed_in_mid_transfer() -> None:
    playing = acts(prefill_worker())
    survival = await playing.kill_decoder(FakeWorker(2, {}), decode_worker(3))
    assert survival.landed_before == 2
    assert (survival.killed_pid, survival.successor_pid) == (2, 3)
    assert survival.landed_before < len(survival.taken_over.layers)


async def test_a_lost_entry_fails_the_act() -> None:
    with pytest.raises(ActFailed, match="lost"):
        await acts(prefill_worker(kept=0)).kill_decoder(
            FakeWorker(2, {}), decode_worker(3)
        )


async def test_a_decoder_that_outlives_the_transfer_fails_the_act() -> None:
    with pytest.raises(ActFailed, match="not killed in mid-transfer"):
        await acts(prefill_worker()).kill_decoder(decode_worker(), decode_worker(3))


async def test_tokens_are_read_back_by_the_prefill() -> None:
    assert await acts(prefill_worker()).read_back((1, 2)) == "words"

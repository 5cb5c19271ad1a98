from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asynckv.cli.demo.acts import ActFailed, Acts
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
from asynckv.cli.demo.processes import Worker, WorkerEnded

READY = Ready(
    pid=1, url="tcp://here", folder="/m", prompt=(1, 2, 3), kv_bytes=10, max_bytes=25,
    layers=5,
)  # fmt: skip
PREFILLED = Prefilled(1.0, 2.0, ((1.0, 2.0),) * 5, (1.5,) * 5, 0.01)
GENERATED = Generated(
    began_s=0.5,
    landed_s=(2.25,) * 5,
    token_times_s=(2.5,),
    prompt_positions=1,
    attempt=2,
    tokens=(9,),
    worst_lag_s=0.02,
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


def acts(
    prefill: FakeWorker, successor: Callable[[], FakeWorker] = decode_worker
) -> Acts:
    async def start() -> Worker:
        return successor()

    return Acts(prefill, READY, start)


async def test_recomputing_counts_from_when_it_was_asked() -> None:
    recompute = await acts(prefill_worker()).recompute(decode_worker())
    assert recompute.first_token_s == 2.0


async def test_both_sides_of_a_hand_over_are_asked_for_one_entry() -> None:
    prefill, decode = prefill_worker(), decode_worker()
    hand_over = await acts(prefill).hand_over(decode, "bulk")
    assert hand_over.tail_s == 0.25
    assert prefill.asked == [Prefill("bulk", "demo-bulk")]
    assert decode.asked == [Select("bulk", "demo-bulk")]


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
    successor = decode_worker(3)
    playing = acts(prefill_worker(), lambda: successor)
    survival, took_over = await playing.kill_decoder(FakeWorker(2, {}))
    assert survival.landed_before == 2
    assert (survival.killed_pid, survival.successor_pid) == (2, 3)
    assert survival.landed_before < len(survival.taken_over.layers)
    assert took_over is successor


async def test_a_lost_entry_fails_the_act() -> None:
    with pytest.raises(ActFailed, match="lost"):
        await acts(prefill_worker(kept=0)).kill_decoder(FakeWorker(2, {}))


async def test_a_decoder_that_outlives_the_transfer_fails_the_act() -> None:
    with pytest.raises(ActFailed, match="not killed in mid-transfer"):
        await acts(prefill_worker()).kill_decoder(decode_worker())


async def test_tokens_are_read_back_by_the_prefill() -> None:
    assert await acts(prefill_worker()).read_back((1, 2)) == "words"

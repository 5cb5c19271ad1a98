from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from asynckv.cli.demo.live import LiveDisplay
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
from asynckv.cli.demo.models import DemoPrompt
from asynckv.cli.demo.play import (
    ActFailed,
    Acts,
    Programs,
    account_backpressure,
    account_hand_over,
    find_problems,
    play_demo,
)
from asynckv.cli.demo.processes import Worker, WorkerEnded
from asynckv.cli.demo.report import BackpressureSample, DemoReport

# Whatever a shell starts in the background ignores SIGINT, and so do its children.
HEED = ("env", "--default-signal=INT")
COMMAND = (sys.executable, "-u", "-m", "asynckv", "demo", "--model", "random-tiny")


BelongingTo = Callable[[Path], list[int]]

ON_A_FAKE_GPU = """
from asynckv.cli.demo.{role} import main
from asynckv.cli.demo.models import Place
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
gpu = fake_device_of(FakeGpus().process())
main(lambda name: Place("cpu", gpu.device))
"""


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.chaos
async def test_all_acts_play_with_buffers_on_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("prefill", "decode"):
        program = ON_A_FAKE_GPU.format(role=role)
        (tmp_path / f"{role}_on_gpu.py").write_text(program, encoding="utf-8")
    prompt = DemoPrompt(60 * "a tale ", "What?", "Who?")
    (tmp_path / "prompt").write_bytes(msgspec.json.encode(prompt))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    display = LiveDisplay(Console(file=io.StringIO()))
    programs = Programs("prefill_on_gpu", "decode_on_gpu")
    report = await play_demo(
        "random", tmp_path, display, device="cuda:0", programs=programs
    )
    assert report.problems == () and report.tokens_identical
    assert report.transport == "tcp, cuda_ipc payload" and report.device == "cuda:0"


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.chaos)]
)
def test_an_interrupted_demo_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, belonging_to: BelongingTo
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    process = subprocess.Popen(
        [*HEED, *COMMAND, "--html", tmp_path / "page.html"],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(files), "COLUMNS": "200"},
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()  # both processes were started
        assert len(belonging_to(files)) == 3
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    assert b"interrupted" in output
    assert process.returncode == 130
    assert belonging_to(files) == []
    assert [*files.iterdir()] == []
    assert not (tmp_path / "page.html").exists()


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


SLOW_IDS = tuple(f"demo-slow-{number}" for number in range(6))


def decode_worker(
    pid: int = 2, *, found: Generated = GENERATED, ids: tuple[str, ...] = SLOW_IDS
) -> FakeWorker:
    answers: dict[type[Order], Note] = {
        Load: READY,
        Continue: GENERATED,
        Select: found,
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


async def test_the_worst_lag_of_all_acts_is_kept() -> None:
    playing = acts(prefill_worker())
    await playing.hand_over(decode_worker(), "bulk")
    await playing.slow_decoder(decode_worker())
    assert (playing.prefill_lag_s, playing.decode_lag_s) == (0.03, 0.04)


async def test_the_decoder_is_killed_in_mid_transfer() -> None:
    playing = acts(prefill_worker())
    survival = await playing.kill_decoder(FakeWorker(2, {}), decode_worker(3))
    assert survival.landed_before == 2
    assert (survival.killed_pid, survival.successor_pid) == (2, 3)
    assert survival.landed_before < len(survival.taken_over.layers)


NOT_FOUND = msgspec.structs.replace(GENERATED, matched_tokens=0)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            lambda: acts(prefill_worker()).second_request(
                decode_worker(found=NOT_FOUND)
            ),
            "not found",
        ),
        (
            lambda: acts(prefill_worker()).slow_decoder(decode_worker(ids=("other",))),
            "order",
        ),
        (
            lambda: acts(prefill_worker(0)).kill_decoder(
                FakeWorker(2, {}), decode_worker(3)
            ),
            "lost",
        ),
        (
            lambda: acts(prefill_worker()).kill_decoder(
                decode_worker(), decode_worker(3)
            ),
            "not killed in mid-transfer",
        ),
    ],
    ids=["not found", "out of order", "lost entry", "outlives the transfer"],
)
async def test_an_act_fails_that_does_not_come_to_what_it_shows(
    act: Callable[[], Coroutine[Any, Any, object]], words: str
) -> None:
    with pytest.raises(ActFailed, match=words):
        await act()


async def test_tokens_are_read_back_by_the_prefill() -> None:
    assert await acts(prefill_worker()).read_back((1, 2)) == "words"


TWO_LAYERS = Prefilled(
    ended_s=102.0,
    spans=((100.0, 101.0), (101.0, 102.0)),
    handed_s=(100.5, 101.5),
    worst_lag_s=0.001,
)

TWO_TOKENS = Generated(
    landed_s=(100.75, 102.25),
    token_times_s=(102.5, 103.0),
    prompt_positions=1,
    attempt=1,
    tokens=(7, 8),
    worst_lag_s=0.001,
)


def samples(*waiting: int) -> tuple[BackpressureSample, ...]:
    return tuple(
        BackpressureSample(
            at_s=float(index),
            buffered_bytes=100 * index,
            resident_bytes=1000 + 10 * index,
            waiting=count,
        )
        for index, count in enumerate(waiting)
    )


def test_a_hand_over_counts_from_its_request() -> None:
    one = account_hand_over("Bulk", 99.5, TWO_LAYERS, TWO_TOKENS)
    assert (one.prefill_s, one.landed_s, one.first_token_s) == (2.5, 2.75, 3.0)
    assert one.layers[0].compute_start_s == 0.5


def test_each_layer_has_its_own_row() -> None:
    rows = account_hand_over("Bulk", 100.0, TWO_LAYERS, TWO_TOKENS).layers
    assert [row.landed_s for row in rows] == [0.75, 2.25]
    assert [row.name for row in rows] == ["layers.0", "layers.1"]


def test_notes_about_different_numbers_of_layers_do_not_fit() -> None:
    short = msgspec.structs.replace(TWO_TOKENS, landed_s=(100.75,))
    with pytest.raises(ValueError, match="shorter"):
        account_hand_over("Bulk", 100.0, TWO_LAYERS, short)


def test_memory_is_judged_while_inserts_wait() -> None:
    filled = Filled((0.1, 0.5), samples(0, 1, 1, 0), 0.002)
    report = account_backpressure(filled, entry_bytes=100, max_bytes=250)
    assert report.resident_growth_bytes == 10
    assert (report.longest_wait_s, report.peak_bytes) == (0.5, 300)


def test_a_good_run_has_no_problems(sample_report: DemoReport) -> None:
    assert list(find_problems(sample_report)) == []


DIFFER = "the tokens differ from the recomputed ones"
OTHER = (*range(39), 0)


@pytest.mark.parametrize(
    ("act", "changes", "problem"),
    [
        ("bulk", {"tokens": OTHER}, f"KV in bulk: {DIFFER}"),
        ("layerwise", {"tokens": OTHER}, f"KV layer by layer: {DIFFER}"),
        ("second", {"tokens": OTHER}, f"Second request: {DIFFER}"),
        (
            "bulk",
            {"prompt_positions": 2},
            "KV in bulk: the decoder computed 2 positions",
        ),
        (
            *("second", {"prompt_positions": 13}),
            "Second request: the decoder computed 13 positions",
        ),
        (
            *("backpressure", {"peak_bytes": 10**12}),
            "Slow decoder: the buffer held more than max_bytes",
        ),
    ],
)
def test_what_differs_from_a_good_run_is_the_one_problem(
    sample_report: DemoReport, act: str, changes: dict[str, Any], problem: str
) -> None:
    bad = msgspec.structs.replace(getattr(sample_report, act), **changes)
    report = msgspec.structs.replace(sample_report, **{act: bad})
    assert [*find_problems(report)] == [problem]
    assert report.tokens_identical == ("tokens" not in changes)

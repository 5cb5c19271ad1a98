"""A tiny engine, and a report such as a run leaves behind, with made-up figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asynckv.cli.demo.models import load_model, prepare_model
from asynckv.cli.demo.report import (
    BackpressureReport,
    BackpressureSample,
    DemoReport,
    HandOver,
    LayerTrace,
    Machine,
    Recompute,
    SecondRequest,
    Survival,
)
from asynckv.cli.demo.worker import Engine

__all__ = ("engine", "no_progress_bars", "sample_report")

_LAYERS = 30
_TOKENS = tuple(range(40))


def hand_over(title: str, *, layerwise: bool, attempt: int = 1) -> HandOver:
    """Return a hand-over in which each layer computes for 80 ms."""
    end_s = _LAYERS * 0.08
    traces = tuple(
        LayerTrace(
            name=f"layers.{index}",
            compute_start_s=index * 0.08,
            compute_end_s=index * 0.08 + 0.079,
            handed_s=index * 0.08 + 0.04 if layerwise else end_s,
            landed_s=index * 0.08 + 0.055 if layerwise else end_s + 0.11,
        )
        for index in range(_LAYERS)
    )
    landed_s = traces[-1].landed_s
    return HandOver(
        title=title,
        prefill_s=end_s,
        landed_s=landed_s,
        first_token_s=max(end_s, landed_s) + 0.03,
        prompt_positions=1,
        attempt=attempt,
        tokens=_TOKENS,
        layers=traces,
    )


def backpressure() -> BackpressureReport:
    """Return a buffer that fills up at once and then stays full."""
    filling = [0, 84, 168, 168, 84, 168, 168, 84, 168, 168, 84, 84, 0]
    samples = tuple(
        BackpressureSample(
            at_s=100 + index * 0.2,
            buffered_bytes=megabytes * 10**6,
            resident_bytes=900 * 10**6,
            waiting=1 if megabytes == 168 else 0,
        )
        for index, megabytes in enumerate(filling)
    )
    return BackpressureReport(
        entries=6,
        entry_bytes=84_000_000,
        max_bytes=210_000_000,
        longest_wait_s=0.62,
        peak_bytes=168_000_000,
        resident_growth_bytes=300_000,
        worst_lag_s=0.004,
        samples=samples,
    )


@pytest.fixture(autouse=True)
def no_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a model's progress bars from starting a thread that stays."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Return an engine with a tiny random model and a prompt of 20 tokens."""
    folder = prepare_model("random-tiny", tmp_path).folder
    engine = Engine(load_model(folder), tuple(range(1, 21)))
    yield engine
    engine.close()


@pytest.fixture
def sample_report() -> DemoReport:
    """Return the report of a run in which all went well."""
    return DemoReport(
        model="SmolLM2-135M-Instruct",
        prompt_tokens=1822,
        kv_bytes=83_957_760,
        prefill_pid=4711,
        decode_pid=4712,
        transport="tcp, map payload",
        device="cpu",
        recompute=Recompute(first_token_s=2.45, prompt_positions=1822, tokens=_TOKENS),
        bulk=hand_over("KV in bulk", layerwise=False),
        layerwise=hand_over("KV layer by layer", layerwise=True),
        second=SecondRequest(
            prompt_tokens=1820,
            matched_tokens=1808,
            prompt_positions=12,
            landed_s=0.05,
            first_token_s=0.25,
            tokens=_TOKENS,
            recomputed=Recompute(2.5, 1820, _TOKENS),
        ),
        backpressure=backpressure(),
        survival=Survival(
            killed_pid=4712,
            landed_before=12,
            prefill_running=True,
            back_after_s=0.012,
            successor_pid=4799,
            taken_over=hand_over("Taken over", layerwise=True, attempt=2),
        ),
        prefill_lag_s=0.0061,
        decode_lag_s=0.0049,
        text='They built a rope, so that <each> portion could "leave" at once.',
        machine=Machine("0.1.0", "2026-01-02 03:04 UTC", "a CPU", "3.11.7", "2.13.0"),
        seconds=48.0,
    )

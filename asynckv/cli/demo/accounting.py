"""From what two processes noted to what the report says. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from asynckv.cli.demo.messages import Filled, Generated, Prefilled
from asynckv.cli.demo.report import (
    BackpressureReport,
    DemoReport,
    HandOver,
    LayerTrace,
)

__all__ = ("account_backpressure", "account_hand_over", "find_problems")


def account_hand_over(
    title: str, asked_s: float, prefilled: Prefilled, generated: Generated
) -> HandOver:
    """Join both sides' notes of one hand-over, counted from ``asked_s``."""
    zero = asked_s
    sides = zip(prefilled.spans, prefilled.handed_s, generated.landed_s, strict=True)
    return HandOver(
        title=title,
        prefill_s=prefilled.ended_s - zero,
        landed_s=max(generated.landed_s) - zero,
        first_token_s=generated.token_times_s[0] - zero,
        prompt_positions=generated.prompt_positions,
        attempt=generated.attempt,
        tokens=generated.tokens,
        layers=tuple(
            LayerTrace(
                name=f"layers.{index}",
                compute_start_s=start_s - zero,
                compute_end_s=end_s - zero,
                handed_s=handed_s - zero,
                landed_s=landed_s - zero,
            )
            for index, ((start_s, end_s), handed_s, landed_s) in enumerate(sides)
        ),
    )


def account_backpressure(
    filled: Filled, *, entry_bytes: int, max_bytes: int
) -> BackpressureReport:
    """Judge memory by the samples from the first insert that waited to the last."""
    waiting = [sample for sample in filled.samples if sample.waiting]
    resident = [sample.resident_bytes for sample in waiting] or [0]
    return BackpressureReport(
        entries=len(filled.waits_s),
        entry_bytes=entry_bytes,
        max_bytes=max_bytes,
        longest_wait_s=max(filled.waits_s),
        peak_bytes=max((sample.buffered_bytes for sample in filled.samples), default=0),
        resident_growth_bytes=max(resident) - resident[0],
        worst_lag_s=filled.worst_lag_s,
        samples=filled.samples,
    )


def find_problems(report: DemoReport) -> Iterable[str]:
    """Yield everything in which the run did not keep what the demo promises."""
    expected = report.recompute.tokens
    survival, slow = report.survival, report.backpressure
    for hand_over in (report.bulk, report.layerwise, survival.taken_over):
        if hand_over.tokens != expected:
            yield f"{hand_over.title}: the tokens differ from the recomputed ones"
        if hand_over.prompt_positions != 1:
            positions = hand_over.prompt_positions
            yield f"{hand_over.title}: the decoder computed {positions} positions"
    second = report.second
    if second.tokens != second.recomputed.tokens:
        yield "Second request: the tokens differ from the recomputed ones"
    if second.prompt_positions != second.prompt_tokens - second.matched_tokens:
        positions = second.prompt_positions
        yield f"Second request: the decoder computed {positions} positions"
    if report.recompute.prompt_positions != report.prompt_tokens:
        yield "Recompute: the decoder did not compute the whole prompt"
    if slow.peak_bytes > slow.max_bytes:
        yield "Slow decoder: the buffer held more than max_bytes"
    if slow.longest_wait_s <= 0.0:
        yield "Slow decoder: no insert had to wait"
    if survival.landed_before >= len(survival.taken_over.layers):
        yield "Killed decoder: the transfer was over before it died"
    if survival.taken_over.attempt < 2:
        yield "Killed decoder: its successor's delivery counts as the first one"

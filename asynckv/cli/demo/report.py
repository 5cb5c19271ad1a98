"""What the demo found out: values, as ``--json`` prints them, and how they are written.

Times are seconds. Those of an act count from its request: the moment in which the
parent asks its two processes. The terminal and the page write figures alike.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import msgspec

__all__ = (
    "BackpressureReport",
    "BackpressureSample",
    "Bar",
    "DemoReport",
    "Figure",
    "HandOver",
    "LayerTrace",
    "Machine",
    "Recompute",
    "SecondRequest",
    "Survival",
    "figures_of",
    "first_token_bars",
    "second_request_bars",
    "write_bytes",
    "write_fall",
    "write_machine",
    "write_seconds",
    "write_tail",
    "write_transport",
)


class LayerTrace(msgspec.Struct, frozen=True):
    """One row of the timeline: a layer's compute, its way, its arrival.

    ``handed_s`` is when the layer left the forward pass, ``landed_s`` when it was in
    the decoder. Keys and values of a layer exist before all of it is computed, so
    both may come before ``compute_end_s``.
    """

    name: str
    compute_start_s: float
    compute_end_s: float
    handed_s: float
    landed_s: float


class Recompute(msgspec.Struct, frozen=True):
    """Act 1: the decoder computes the prompt by itself."""

    first_token_s: float
    prompt_positions: int
    tokens: tuple[int, ...]

    @property
    def stages_s(self) -> tuple[float, float, float]:
        """As those of a hand-over: nothing is waited for but its compute."""
        return self.first_token_s, 0.0, 0.0


class HandOver(msgspec.Struct, frozen=True):
    """Acts 2, 3 and 6: one prefill here and one decode there.

    ``prefill_s`` is when the prefill's compute ended, ``landed_s`` when the decoder
    had the last layer, ``first_token_s`` when it had its first token.
    """

    title: str
    prefill_s: float
    landed_s: float
    first_token_s: float
    prompt_positions: int
    attempt: int
    tokens: tuple[int, ...]
    layers: tuple[LayerTrace, ...]

    @property
    def tail_s(self) -> float:
        """How long after the prefill's compute the last layer came; below 0: before."""
        return self.landed_s - self.prefill_s

    @property
    def stages_s(self) -> tuple[float, float, float]:
        """What the first token waited for: compute, then the tail, then its own step.

        They add up to ``first_token_s``. Where the last layer is there before the
        compute ends there is no tail, and what of the compute is left delays nothing.
        """
        compute_s = min(self.prefill_s, self.landed_s)
        return compute_s, self.landed_s - compute_s, self.first_token_s - self.landed_s


class SecondRequest(msgspec.Struct, frozen=True):
    """Act 4: another question about a document whose KV was kept.

    ``matched_tokens`` of the prompt were there, ``landed_s`` is when the decoder had
    their last layer, ``prompt_positions`` are those that it computed itself.
    ``recomputed`` is the same request without the kept KV: measured before and after,
    the faster one.
    """

    prompt_tokens: int
    matched_tokens: int
    prompt_positions: int
    landed_s: float
    first_token_s: float
    tokens: tuple[int, ...]
    recomputed: Recompute

    @property
    def stages_s(self) -> tuple[float, float, float]:
        """As those of a hand-over: nothing is computed before the KV comes."""
        return 0.0, self.landed_s, self.first_token_s - self.landed_s

    @property
    def saved_share(self) -> float:
        """By which share the first token comes earlier than without; below 0: later."""
        return 1 - self.first_token_s / self.recomputed.first_token_s


class BackpressureSample(msgspec.Struct, frozen=True):
    """The producer at one moment of act 5."""

    at_s: float
    buffered_bytes: int
    resident_bytes: int
    waiting: int


class BackpressureReport(msgspec.Struct, frozen=True):
    """Act 5: more entries than the buffer may hold, for a decoder in no hurry."""

    entries: int
    entry_bytes: int
    max_bytes: int
    longest_wait_s: float
    peak_bytes: int
    resident_growth_bytes: int
    worst_lag_s: float
    samples: tuple[BackpressureSample, ...]


class Survival(msgspec.Struct, frozen=True):
    """Act 6: the decoder dies in mid-transfer, another one takes the entry."""

    killed_pid: int
    landed_before: int
    prefill_running: bool
    back_after_s: float
    successor_pid: int
    taken_over: HandOver


class Machine(msgspec.Struct, frozen=True):
    """What ran, when and where, in words that name nobody."""

    version: str
    began: str
    host: str
    python: str
    torch: str


class DemoReport(msgspec.Struct, frozen=True):
    """Everything one run of the demo measured.

    ``device`` is what both processes compute on, and have their buffers on.
    ``problems`` is empty exactly when the run kept what it promises.
    """

    model: str
    prompt_tokens: int
    kv_bytes: int
    prefill_pid: int
    decode_pid: int
    transport: str
    device: str
    recompute: Recompute
    bulk: HandOver
    layerwise: HandOver
    second: SecondRequest
    backpressure: BackpressureReport
    survival: Survival
    prefill_lag_s: float
    decode_lag_s: float
    text: str
    machine: Machine
    seconds: float
    problems: tuple[str, ...] = ()

    @property
    def tokens_identical(self) -> bool:
        """Were the tokens the same as recomputed, in every act?"""
        handed = (self.bulk, self.layerwise, self.survival.taken_over)
        same = all(one.tokens == self.recompute.tokens for one in handed)
        return same and self.second.tokens == self.second.recomputed.tokens

    @property
    def sums(self) -> dict[str, object]:
        """The figures that its values add up to, for ``--json``."""
        return {
            "tokens_identical": self.tokens_identical,
            "bulk_tail_s": self.bulk.tail_s,
            "bulk_first_token_s": self.bulk.first_token_s,
            "layerwise_tail_s": self.layerwise.tail_s,
            "layerwise_first_token_s": self.layerwise.first_token_s,
            "second_first_token_s": self.second.first_token_s,
        }


_PAYLOADS = {
    "map": "read from memory that both processes share",
    "cuda_ipc": "read from the other process's memory of the GPU",
    "nccl": "by NCCL",
    "inline": "over the network connection",
}


class Figure(NamedTuple):
    """One row of the final table."""

    name: str
    value: str
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Bar:
    """One way to a first token: seconds of compute, of transfer, of its own step."""

    name: str
    stages_s: tuple[float, float, float]
    remark: str


def write_seconds(seconds: float) -> str:
    """Write a duration in the unit that suits it.

    >>> write_seconds(0.0134), write_seconds(2.4472), write_seconds(0.0004)
    ('13.4 ms', '2.45 s', '0.4 ms')
    """
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


def write_bytes(nbytes: float) -> str:
    """Write a number of bytes in megabytes.

    >>> write_bytes(83_957_760)
    '84.0 MB'
    """
    return f"{nbytes / 1e6:,.1f} MB"


def write_machine(machine: Machine) -> str:
    """Write what ran, when and where."""
    return (
        f"asynckv {machine.version} · {machine.began} · {machine.host} · "
        f"Python {machine.python}, torch {machine.torch}"
    )


def write_tail(one: HandOver) -> str:
    """Write how long the last layer came after the compute, or how long before."""
    if one.tail_s > 0.0:
        return f"last layer {write_seconds(one.tail_s)} after the prefill's compute"
    return f"last layer {write_seconds(-one.tail_s)} before the prefill's compute ended"


def write_fall(second: SecondRequest) -> str:
    """Write by how much the time to first token falls, or that it does not."""
    share = second.saved_share
    with_s = write_seconds(second.first_token_s)
    without_s = write_seconds(second.recomputed.first_token_s)
    return (
        f"KV of {second.matched_tokens:,} of {second.prompt_tokens:,} tokens is there: "
        f"the first token comes {with_s} after the request instead of {without_s}, "
        f"{abs(share):.0%} {'earlier' if share > 0 else 'later'}"
    )


def write_transport(transport: str) -> str:
    """Write how payload moved, of ``"tcp, map payload"`` and the like."""
    scheme, _, payload = transport.removesuffix(" payload").partition(", ")
    return f"{_PAYLOADS.get(payload, payload)}, control over {scheme}"


def first_token_bars(report: DemoReport) -> tuple[Bar, ...]:
    """Return the three ways to a first token, all counted from the request."""
    return (
        _bar("recompute", report.recompute),
        _bar("KV in bulk", report.bulk),
        _bar("KV layer by layer", report.layerwise),
    )


def second_request_bars(second: SecondRequest) -> tuple[Bar, ...]:
    """Return the second request without and with the kept KV."""
    return (
        _bar("recompute", second.recomputed),
        _bar("KV kept", second),
    )


def _bar(name: str, run: Recompute | HandOver | SecondRequest) -> Bar:
    several = "" if run.prompt_positions == 1 else "s"
    remark = f"decoder computes {run.prompt_positions:,} position{several}"
    return Bar(name, run.stages_s, remark)


def figures_of(report: DemoReport) -> tuple[Figure, ...]:
    """Return the rows of the final table, in the order in which they are read."""
    slow, survival = report.backpressure, report.survival
    return (
        Figure(
            "prompt tokens",
            f"{report.prompt_tokens:,}",
            f"{report.model} on {report.device}",
        ),
        Figure(
            "KV moved", write_bytes(report.kv_bytes), write_transport(report.transport)
        ),
        _tail_figure("tail, in bulk", report.bulk),
        _tail_figure("tail, layer by layer", report.layerwise),
        Figure(
            "longest wait of insert",
            write_seconds(slow.longest_wait_s),
            f"for room: the buffer holds at most {write_bytes(slow.max_bytes)}",
        ),
        Figure(
            "entry back after the kill",
            write_seconds(survival.back_after_s),
            "then another decoder could take it",
        ),
        Figure(
            "event loop late at most",
            write_seconds(max(report.prefill_lag_s, report.decode_lag_s)),
            f"prefill process {write_seconds(report.prefill_lag_s)}, decode process "
            f"{write_seconds(report.decode_lag_s)}; the model computes in a thread",
        ),
        Figure(
            "tokens identical",
            "yes" if report.tokens_identical else "NO",
            f"{len(report.recompute.tokens)} tokens an act, against recomputing",
        ),
    )


def _tail_figure(name: str, one: HandOver) -> Figure:
    value = write_seconds(one.tail_s) if one.tail_s > 0.0 else "none"
    return Figure(name, value, write_tail(one))

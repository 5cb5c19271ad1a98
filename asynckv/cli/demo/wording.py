"""How the demo writes its figures, the same in the terminal and on the page."""

from __future__ import annotations

import dataclasses

from asynckv.cli.demo.report import DemoReport, HandOver, Recompute, SecondRequest

__all__ = (
    "Bar",
    "Figure",
    "figures_of",
    "first_token_bars",
    "second_request_bars",
    "write_bytes",
    "write_fall",
    "write_seconds",
    "write_tail",
    "write_transport",
)

_PAYLOADS = {
    "map": "read from memory that both processes share",
    "cuda_ipc": "read from the other process's memory of the GPU",
    "nccl": "by NCCL",
    "inline": "over the network connection",
}


@dataclasses.dataclass(frozen=True)
class Figure:
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
        _recompute_bar(report.recompute),
        Bar(
            "KV in bulk", report.bulk.stages_s, _computes(report.bulk.prompt_positions)
        ),
        Bar(
            "KV layer by layer",
            report.layerwise.stages_s,
            _computes(report.layerwise.prompt_positions),
        ),
    )


def second_request_bars(second: SecondRequest) -> tuple[Bar, ...]:
    """Return the second request without and with the kept KV."""
    return (
        _recompute_bar(second.recomputed),
        Bar("KV kept", second.stages_s, _computes(second.prompt_positions)),
    )


def _recompute_bar(run: Recompute) -> Bar:
    stages_s = (run.first_token_s, 0.0, 0.0)
    return Bar("recompute", stages_s, _computes(run.prompt_positions))


def _computes(positions: int) -> str:
    some = "1 position" if positions == 1 else f"{positions:,} positions"
    return f"decoder computes {some}"


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

"""How the demo writes its figures, the same in the terminal and on the page."""

from __future__ import annotations

import dataclasses

from asynckv.cli.demo.report import DemoReport

__all__ = ("Figure", "figures_of", "write_bytes", "write_seconds", "write_sooner")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One row of the final table."""

    name: str
    value: str
    remark: str = ""


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


def figures_of(report: DemoReport) -> tuple[Figure, ...]:
    """Return the rows of the final table, in the order in which they are read."""
    bulk, layerwise = report.bulk, report.layerwise
    recompute_s = report.recompute.first_token_s
    share = layerwise.tail_s / layerwise.prefill_s
    return (
        Figure(
            "prompt tokens",
            f"{report.prompt_tokens:,}",
            f"{report.model} on {report.device}",
        ),
        Figure("KV moved", write_bytes(report.kv_bytes), report.transport),
        Figure(
            "prefill compute", write_seconds(layerwise.prefill_s), "while layers leave"
        ),
        Figure(
            "tail after the last layer, bulk",
            write_seconds(bulk.tail_s),
            f"beside {write_seconds(bulk.prefill_s)} of compute",
        ),
        Figure(
            "tail after the last layer, layer-wise",
            write_seconds(layerwise.tail_s),
            f"{share:.1%} of the compute",
        ),
        Figure("first token, recomputed", write_seconds(recompute_s), "no transfer"),
        Figure(
            "first token, bulk",
            write_seconds(bulk.wait_s),
            write_sooner(recompute_s, bulk.wait_s),
        ),
        Figure(
            "first token, layer-wise",
            write_seconds(layerwise.wait_s),
            write_sooner(recompute_s, layerwise.wait_s),
        ),
        Figure("worst loop lag, prefill", write_seconds(report.prefill_lag_s)),
        Figure("worst loop lag, decode", write_seconds(report.decode_lag_s)),
        Figure(
            "tokens identical",
            "yes" if report.tokens_identical else "NO",
            f"{len(report.recompute.tokens)} tokens, four ways",
        ),
    )


def write_sooner(recompute_s: float, wait_s: float) -> str:
    """Write how much sooner the first token comes by KV than by recomputing.

    Rounded down, so that it never says more than was measured.

    >>> write_sooner(2.45, 0.14), write_sooner(2.45, 0.0)
    ('17 times sooner', 'before the prefill was through')
    """
    if wait_s <= 0.0:
        return "before the prefill was through"
    return f"{int(recompute_s / wait_s)} times sooner"

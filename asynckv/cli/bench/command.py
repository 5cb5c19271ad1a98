"""``asynckv bench``: what its options mean, what it shows, and what it leaves behind.

What needs torch is imported when it is used, so that ``--help`` is quick. The terminal
has a bar while the bench runs and a row for each case that is over; it is drawn between
measurements only, never beside one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import msgspec
from cyclopts import Parameter, validators
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from asynckv.cli.bench.report import Baseline, BenchReport, Row, Subject
from asynckv.cli.bench.settings import Selection, Settings
from asynckv.cli.bench.wording import (
    speedup_of,
    write_comparison,
    write_cpu,
    write_direction,
    write_duration,
    write_median,
    write_value,
    write_verdict,
)
from asynckv.cli.document import check_writable
from asynckv.cli.process import INTERRUPTED, LoopName, run, until_ended
from asynckv.errors import AsyncKVError, ConfigError
from asynckv.links.options import Digest
from asynckv.security.tls import TLS

__all__ = (
    "BenchDisplay",
    "bench",
    "closing_table",
)


_STYLES = {"ok": "green", "void": "yellow", "failed": "bold red"}
_EXPLAINED = (
    "A row is the median of its rounds [least-most], then asynckv beside what was\n"
    "measured in the same rounds. VOID: the machine was too busy; do not quote it.\n"
    "The bare asyncio echo, for what is small, is an asyncio.Protocol with a length,\n"
    "one msgspec frame and one future, on the same loops, in turns of ten with asynckv."
)


class BenchDisplay:
    """Shows how the run goes on. Used as a context manager.

    Where the output is no terminal there is no bar.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            console=console,
            auto_refresh=False,  # its thread would take turns with the event loop
            transient=True,
            disable=not console.is_terminal,
        )
        self._all = self._progress.add_task("cases", total=None)
        self._case = self._progress.add_task("", total=1, visible=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def expect(self, cases: int, about_s: float, quick_s: float) -> None:
        """So many cases will be measured, in about so long."""
        some = "1 case" if cases == 1 else f"{cases} cases"
        took = f"{some}, about {write_duration(about_s)} on an idle machine"
        if quick_s < about_s:
            took += f"; --quick takes {write_duration(quick_s)}, --case NAME one case"
        self._console.print(Text(f"{took}.\n{_EXPLAINED}\n"))
        self._progress.update(self._all, total=cases, refresh=True)

    def begin(self, title: str, steps: int) -> None:
        """Show that a case has begun, of so many steps."""
        self._progress.update(
            self._case,
            description=title,
            total=steps,
            completed=0,
            visible=True,
            refresh=True,
        )

    def advance(self, steps: int) -> None:
        """Show how many steps are over."""
        self._progress.update(self._case, completed=steps, refresh=True)

    def end(self, row: Row) -> None:
        """Print the row, a line for each of its baselines, and go on."""
        verdict = (write_verdict(row), _STYLES[row.verdict])
        title = (row.subject.title, "bold")
        lines = [Text.assemble(title, "  ", write_value(row), "  ", verdict)]
        for one in row.baselines:
            words = f"    {write_comparison(row.subject, one)}"
            lines.append(Text(words, _style_of(row.subject, one)))
        if cpu := write_cpu(row):
            lines.append(Text(f"    {cpu}"))
        for line in lines:
            self._console.print(line, soft_wrap=True)
        self._progress.update(self._case, visible=False)
        self._progress.advance(self._all)
        self._progress.refresh()


def closing_table(report: BenchReport) -> Table:
    """Return one line a case, beside its first baseline, to be printed at the end."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("case", "asynckv", "beside", ""):
        table.add_column(name)
    for row in report.rows:
        value = "" if row.ours is None else write_median(row)
        beside = Text()
        if row.baselines:
            first = row.baselines[0]
            words = write_direction(row.subject, first)
            beside.append(words, _style_of(row.subject, first))
        verdict = Text(row.verdict, _STYLES[row.verdict])
        table.add_row(row.subject.title, value, beside, verdict)
    return table


def _style_of(subject: Subject, baseline: Baseline) -> str:
    if baseline.is_void:
        return "yellow"
    return "green" if speedup_of(subject, baseline).median >= 1 else "red"


_SERVE_AT = "tcp://127.0.0.1:0"
_Flag = Annotated[bool, Parameter(negative=())]
_Several = Annotated[list[str] | None, Parameter(negative=())]
_Positive = Annotated[float | None, Parameter(validator=validators.Number(gt=0))]


def bench(
    url: str | None = None,
    /,
    *,
    serve: _Flag = False,
    quick: _Flag = False,
    case: _Several = None,
    shape: _Several = None,
    seconds: _Positive = None,
    json: Path | None = None,
    html: Path | None = None,
    digest: Digest = "auto",
    lanes: int | None = None,
    secret_file: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    ca: Path | None = None,
    allow_plaintext: _Flag = False,
    loop: LoopName = "auto",
) -> int:
    """Measure asynckv on your own machines, each figure beside a baseline.

    Without a URL both sides are processes of this machine. The exit status is 0
    unless a case failed. A row is void where its baseline disagrees with itself or its
    rounds with each other: do not quote it.

    Parameters
    ----------
    url
        Where `asynckv bench --serve` runs, or any server of a lookup buffer, such as
        `asynckv serve --lookup`: that one is measured without raw TCP beside it. With
        --serve, where to serve.
    serve
        Be the other side, until Ctrl-C.
    quick
        Tiny sizes: shows in seconds that everything works, and measures little.
    case
        Only this case, as `ping`, `entry-1MiB` or `'scattered-*'`; may be repeated.
    shape
        An entry of your own shape, tensors by bytes of each, as `32x2MiB`; may be
        repeated.
    seconds
        How long to measure each case, instead of six rounds.
    json
        Where to write the report, as docs/bench.md describes it.
    html
        Where to write the page with the plots.
    digest
        ``full``, ``edges``, ``off``, or what suits the path.
    lanes
        Payload lanes of the link.
    secret_file
        The secret that both sides share, as for ``serve`` and ``connect``.
    certificate
        This side's certificate for ``tls://``, with --key and --ca.
    key
        The key of the certificate.
    ca
        The authorities that certify peers.
    allow_plaintext
        Allow ``tcp://`` beyond this host.
    loop
        ``asyncio`` or ``uvloop``, by itself the latter where it is installed.
    """
    console = Console()
    try:
        if serve:
            _refuse(case=case, shape=shape, seconds=seconds, json=json, html=html)
        settings = Settings(
            digest=digest,
            lanes=lanes,
            secret_file=None if secret_file is None else str(secret_file),
            tls=_tls_of(certificate, key, ca),
            allow_plaintext=allow_plaintext,
            loop=loop,
        )
        if serve:
            run(until_ended(_serve(url or _SERVE_AT, settings, console)), loop)
            return 0
        selection = _selection(quick, case, shape, seconds)
        return _measure_cases(url, settings, console, selection, json=json, html=html)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; nothing is left behind")
        return INTERRUPTED
    except (AsyncKVError, OSError) as exc:
        words = f"the bench failed: {exc}"
        console.print(Text(words, style="bold red"), soft_wrap=True)
        return 1


def _measure_cases(
    url: str | None,
    settings: Settings,
    console: Console,
    selection: Selection,
    *,
    json: Path | None,
    html: Path | None,
) -> int:
    for path in (json, html):
        if path is not None:
            check_writable(path)
    measuring = _measure(url, settings, console, selection)
    report = run(until_ended(measuring), settings.loop)
    return _leave_behind(report, console, json, html)


def _refuse(**options: object) -> None:
    """Refuse what the serving side would pay no heed to."""
    if ignored := [f"--{name}" for name, given in options.items() if given is not None]:
        words = f"--serve takes no {' and no '.join(ignored)}"
        raise ConfigError(words, hint="they are for the side that measures transfers")


def _tls_of(certificate: Path | None, key: Path | None, ca: Path | None) -> TLS | None:
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise ConfigError("--certificate, --key and --ca belong together")
    return TLS(certificate=certificate, key=key, ca=ca)


def _selection(
    quick: bool, case: list[str] | None, shape: list[str] | None, seconds: float | None
) -> Selection:
    from asynckv.cli.bench.catalogue import read_shape

    shapes = tuple(map(read_shape, shape or ()))
    return Selection(
        quick=quick, cases=tuple(case or ()), shapes=shapes, seconds=seconds
    )


async def _serve(url: str, settings: Settings, console: Console) -> None:
    from asynckv.cli.bench.server import serving

    async with serving(url, settings) as served:
        words = f"serving; on the other host: asynckv bench {served}"
        console.print(words, highlight=False, soft_wrap=True)
        await asyncio.get_running_loop().create_future()


async def _measure(
    url: str | None, settings: Settings, console: Console, selection: Selection
) -> BenchReport:
    from asynckv.cli.bench.catalogue import run_bench

    with BenchDisplay(console) as display:
        return await run_bench(url, settings, display, selection)


def _leave_behind(
    report: BenchReport, console: Console, json: Path | None, html: Path | None
) -> int:
    from asynckv.cli.bench.page import render_page
    from asynckv.cli.bench.wording import write_summary

    console.print("")
    console.print(closing_table(report))
    console.print(write_summary(report), highlight=False)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if html is not None:
        html.write_text(render_page(report), encoding="utf-8")
        console.print(f"page: {html.resolve()}", highlight=False, soft_wrap=True)
    return 1 if any(row.verdict == "failed" for row in report.rows) else 0

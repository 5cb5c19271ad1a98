"""``asynckv bench``: what its options mean, and what it leaves behind.

What needs torch is imported when it is used, so that ``--help`` is quick.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter, validators
from rich.console import Console
from rich.text import Text

from asynckv.cli.bench.report import DigestName, Selection, Settings
from asynckv.cli.document import check_writable
from asynckv.cli.options import NO_KEY_OPTIONS, KeyOptions, in_flags
from asynckv.cli.process import INTERRUPTED, LoopName, run, until_ended
from asynckv.errors import AsyncKVError, ConfigError

__all__ = ("bench",)

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
    digest: DigestName = "auto",
    lanes: int | None = None,
    loop: LoopName = "auto",
    keys: KeyOptions = NO_KEY_OPTIONS,
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
            secret_file=keys.secret_file,
            tls=keys.tls,
            allow_plaintext=keys.allow_plaintext,
            loop=loop,
        )
        if serve:
            run(until_ended(_serve(url or _SERVE_AT, settings, console)), loop)
            return 0
        selection = Selection(
            quick=quick,
            cases=tuple(case or ()),
            shapes=tuple(shape or ()),
            seconds=seconds,
        )
        return _measure(url, settings, selection, console, json=json, html=html)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; nothing is left behind")
        return INTERRUPTED
    except (AsyncKVError, OSError) as exc:
        words = f"the bench failed: {in_flags(exc)}"
        console.print(Text(words, style="bold red"), soft_wrap=True)
        return 1


def _refuse(**options: object) -> None:
    """Refuse what the serving side would pay no heed to."""
    if ignored := [f"--{name}" for name, given in options.items() if given is not None]:
        words = f"--serve takes no {' and no '.join(ignored)}"
        raise ConfigError(words, hint="they are for the side that measures transfers")


async def _serve(url: str, settings: Settings, console: Console) -> None:
    from asynckv.cli.bench.server import serving

    async with serving(url, settings) as served:
        words = f"serving; on the other host: asynckv bench {served}"
        console.print(words, highlight=False, soft_wrap=True)
        await asyncio.get_running_loop().create_future()


def _measure(
    url: str | None,
    settings: Settings,
    selection: Selection,
    console: Console,
    *,
    json: Path | None,
    html: Path | None,
) -> int:
    from asynckv.cli.bench.page import render_page
    from asynckv.cli.bench.run import BenchDisplay, closing_table, run_bench
    from asynckv.cli.bench.wording import write_summary

    for path in filter(None, (json, html)):
        check_writable(path)
    measuring = run_bench(url, settings, BenchDisplay(console), selection)
    report = run(until_ended(measuring), settings.loop)
    console.print("", closing_table(report), sep="\n")
    console.print(write_summary(report), highlight=False)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if html is not None:
        html.write_text(render_page(report), encoding="utf-8")
        console.print(f"page: {html.resolve()}", highlight=False, soft_wrap=True)
    return 1 if any(row.verdict == "failed" for row in report.rows) else 0

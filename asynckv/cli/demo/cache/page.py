"""The page of the demo of the cache: one self-contained HTML file.

A pure function of the report; nothing on the page is fetched from anywhere.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator
from html import escape
from typing import Final

from asynckv.cli.demo.cache.report import CacheReport, Part, Request, hit_rate
from asynckv.cli.demo.report import write_bytes, write_machine, write_seconds
from asynckv.cli.document import (
    write_document,
    write_head,
    write_numbers,
    write_section,
    write_verdict,
)

__all__ = ("headline", "render_page")

_TITLES: Final[dict[Part, str]] = {
    "document": "One document, several questions",
    "chat": "One chat, whose turns go to the engines in turn",
    "killed": "After kill -9 of engine 2 and the server",
}
_FIRST_KEY: Final = """<ul class="key">
<li style="--swatch: var(--wire)">each engine with its own cache</li>
<li style="--swatch: var(--compute)">with the store that they share</li>
</ul>"""
_SOURCES_KEY: Final = """<ul class="key">
<li style="--swatch: var(--compute)">found in memory</li>
<li style="--swatch: var(--step)">found on disk</li>
<li style="--swatch: var(--line)">computed</li>
</ul>"""


def render_page(report: CacheReport) -> str:
    """Return the whole page as text."""
    body = "\n".join(
        (
            _head(report),
            _first_tokens(report),
            _sources(report),
            _kill(report),
            write_numbers(_figures(report)),
            _foot(report),
        )
    )
    title = "asynckv: compute a prompt once"
    return write_document(title, "asynckv.cli.demo", body)


def headline(report: CacheReport) -> tuple[str, str]:
    """Return what was seen, in two sentences."""
    found_s, cold_s = report.found_first_tokens_s, report.cold_first_tokens_s
    medians_s = statistics.median(found_s), statistics.median(cold_s)
    counts = f"Medians of {len(found_s)} and of {len(cold_s)}."
    after = _compare(report.restarted[0].first_token_s, report.cold.first_token_s)
    return (
        f"A document that some engine has read: {_compare(*medians_s)} {counts}",
        f"After kill -9 of an engine and the server, from its disk: {after}",
    )


def _compare(found_s: float, cold_s: float) -> str:
    return (
        f"first token after {write_seconds(found_s)}, {found_s / cold_s:.0%} of the "
        f"{write_seconds(cold_s)} of an engine that computes it all."
    )


def _head(report: CacheReport) -> str:
    several = len(report.shared) + len(report.restarted)
    facts = (
        f"{report.model} · two engines, one server · {several} requests, the longest "
        f"{max(one.prompt_tokens for one in report.shared):,} prompt tokens · "
        f"{report.chunk_tokens} tokens a block, {write_bytes(report.block_bytes)}"
    )
    lines = (re.sub(r"(?<=\d) (?=m?s\b)", "&nbsp;", line) for line in headline(report))
    seen = "".join(f'<p class="seen">{line}</p>' for line in lines)
    same = "the same tokens, whatever was found"
    verdict = write_verdict(report.tokens_identical, same, report.problems)
    head = write_head("Compute a prompt once", facts, write_machine(report.machine))
    return f"{head}\n{verdict}\n{seen}"


def _first_tokens(report: CacheReport) -> str:
    note = (
        "From the moment in which a request was sent to the moment in which its first "
        "token was read, in the process that sent it; one request at a time. Both runs "
        "have the same model, requests and block size, and began with engines that had "
        "just been started. An engine alone has as much memory for its cache as the "
        "server has for all; it knows the chat up to its own last turn."
    )
    longest_s = max(one.first_token_s for pair in report.pairs for one in pair)

    def draw(alone: Request, shared: Request) -> str:
        remark = "" if alone.found_tokens else "nothing stored"
        if alone.engine != shared.engine:
            remark += f", engine {alone.engine}"
        return _bar("wire", alone, longest_s, remark) + _bar(
            "compute", shared, longest_s
        )

    chart = _chart("first-tokens", report, draw)
    return write_section("Time to first token", note, _FIRST_KEY, chart)


def _bar(kind: str, one: Request, longest_s: float, remark: str = "") -> str:
    first_s = one.first_token_s
    return (
        f'<div class="bar"><i class="{kind}" style="{_wide(first_s, longest_s)}"></i>'
        f"<b>{write_seconds(first_s)}</b> <small>{remark}</small></div>"
    )


def _sources(report: CacheReport) -> str:
    alone, shared = hit_rate(report.alone), hit_rate(report.shared)
    note = (
        f"Of all prompt tokens before the kill {shared:.0%} were found in the store; "
        f"{alone:.0%} by engines alone. Each bar is one prompt of the run with the "
        "store. The end of a prompt that fills no block is always computed."
    )
    longest = max(one.prompt_tokens for _, one in report.pairs)

    def draw(_: Request, shared: Request) -> str:
        return _stack(shared, longest, report.chunk_tokens)

    chart = _chart("sources", report, draw)
    title = "Where the KV of a prompt came from"
    return write_section(title, note, _SOURCES_KEY, chart)


def _stack(one: Request, longest: int, chunk_tokens: int) -> str:
    disk = one.by_tier.get("disk", 0) * chunk_tokens
    computed = one.prompt_tokens - one.found_tokens
    parts = (("compute", one.found_tokens - disk), ("step", disk), ("rest", computed))
    drawn = "".join(
        f'<i class="{kind}" style="{_wide(tokens, longest)}" '
        f'title="{tokens:,} tokens"></i>'
        for kind, tokens in parts
        if tokens
    )
    share = one.found_tokens / one.prompt_tokens
    return f'<div class="bar">{drawn}<b>{share:.0%}</b></div>'


def _wide(part: float, whole: float) -> str:
    return f"flex-basis: {round(100 * part / whole, 2)}%"


def _chart(
    name: str, report: CacheReport, draw: Callable[[Request, Request], str]
) -> str:
    rows = []
    for part, several in itertools.groupby(report.pairs, lambda pair: pair[1].part):
        rows.append(f"<h3>{_TITLES[part]}</h3>")
        for alone, shared in several:
            title = f"{escape(shared.name)} <small>engine {shared.engine}</small>"
            drawn = f"<div>{draw(alone, shared)}</div>"
            head = f'<div class="name">{title}</div>'
            rows.append(f'<div class="request">{head}{drawn}</div>')
    return f'<div id="{name}">{"".join(rows)}</div>'


def _kill(report: CacheReport) -> str:
    engine, server = report.killed_pids
    missing = f", {report.blocks_missing:,} not" if report.blocks_missing else ""
    words = (
        f"When the disk had {report.blocks_on_disk:,} blocks{missing}, engine 2 "
        f"(process {engine}) and the server (process {server}) were killed at once, by "
        f"SIGKILL. Another server on the same disk answered "
        f"{write_seconds(report.server_back_s)} later. Engine 1 lived on and connected "
        "again by itself; a new engine 2 was started. Both were asked about the "
        "document, and then the new engine once more with nothing stored."
    )
    return f"<h2>What was killed</h2>\n<p>{words}</p>"


def _figures(report: CacheReport) -> Iterator[tuple[str, str, str]]:
    same = "yes" if report.tokens_identical else "NO"
    yield "tokens identical", same, "of every answer, with the store and without"
    rates = f"{hit_rate(report.alone):.0%} by engines alone; before the kill"
    yield "prompt tokens found", f"{hit_rate(report.shared):.0%}", rates
    for tier, blocks in report.read_blocks.items():
        nbytes = write_bytes(blocks * report.block_bytes)
        yield f"read from {tier}", nbytes, f"{blocks:,} blocks, by both engines"
    held = write_bytes(report.blocks_on_disk * report.block_bytes)
    yield "on disk at the kill", held, f"{report.blocks_on_disk:,} blocks"
    yield "memory", write_bytes(report.memory_bytes), "of the server, at most"
    for alone, shared in report.pairs:
        name = f"{shared.name}, engine {shared.engine}"
        yield name, write_seconds(shared.first_token_s), _remark(alone, shared)


def _remark(alone: Request, shared: Request) -> str:
    where = ", ".join(f"{tier} {blocks}" for tier, blocks in shared.by_tier.items())
    return (
        f"{write_seconds(alone.first_token_s)} without the store · of "
        f"{shared.prompt_tokens:,} tokens {shared.computed_tokens:,} computed, "
        f"{alone.computed_tokens:,} without · blocks: {where or 'none'} · by the "
        f"engine's clock {write_seconds(shared.engine_first_token_s)}"
    )


def _foot(report: CacheReport) -> str:
    return (
        f"<footer>Written by <code>asynckv demo cache</code> in "
        f"{write_seconds(report.seconds)}, loading included. All processes ran on one "
        "machine, one request at a time. Each figure was measured once: what else ran "
        "then is in it.</footer>"
    )

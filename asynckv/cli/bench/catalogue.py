"""Which cases there are, in which order, and what they are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from asynckv.cli.bench.asking import open_outstanding, open_pairs, open_ping
from asynckv.cli.bench.lag import open_lag
from asynckv.cli.bench.layerwise import open_tail
from asynckv.cli.bench.measuring import Case
from asynckv.cli.bench.meeting import PING_NBYTES
from asynckv.cli.bench.moving import open_fetching, open_moving
from asynckv.cli.bench.report import Group, Subject
from asynckv.cli.bench.rig import Rig
from asynckv.cli.bench.settings import Scale
from asynckv.cli.bench.wording import write_nbytes

__all__ = ("Exhibit", "catalogue")

_REQUEST_NBYTES = 16 * 2**10
_FETCH_NBYTES = 2 * 2**20
_MAX_REPEATS = 100
_MAX_TENSORS = 4096


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """A subject and how to open its case."""

    subject: Subject
    open: Callable[[Rig], AbstractAsyncContextManager[Case]]


def catalogue(scale: Scale) -> list[Exhibit]:
    """Return every case at that scale; names do not depend on it."""
    return [
        *_entries(scale),
        *_blocks(scale),
        *_latencies(scale),
        *(_outstanding(scale, n) for n in scale.outstanding),
        *_waits(scale),
    ]


def _moving(
    scale: Scale,
    case: str,
    title: str,
    group: Group,
    shape: tuple[int, int],
    *,
    scattered: bool = False,
) -> Exhibit:
    parts, nbytes = shape
    subject = Subject(case, title, group, "GB/s", True, nbytes, parts)
    repeats = _repeats(scale, parts, nbytes)
    return Exhibit(
        subject,
        lambda rig: open_moving(rig, subject, repeats=repeats, scattered=scattered),
    )


def _repeats(scale: Scale, parts: int, nbytes: int) -> int:
    """How often to transfer in one measurement, so that it takes long enough."""
    enough = scale.repeat_to // (parts * nbytes)
    return max(1, min(enough, _MAX_REPEATS, _MAX_TENSORS // parts))


def _entries(scale: Scale) -> list[Exhibit]:
    sized = [
        _moving(
            scale,
            f"entry-{nbytes}",
            f"{write_nbytes(nbytes)} entry",
            "throughput",
            (1, nbytes),
        )
        for nbytes in (*scale.sizes, scale.entry)
    ]
    parts, nbytes = scale.layers
    total = write_nbytes(parts * nbytes)
    title = f"{total} as {parts} layers of {write_nbytes(nbytes)}"
    return [*sized, _moving(scale, "layers", title, "throughput", scale.layers)]


def _blocks(scale: Scale) -> list[Exhibit]:
    parts, nbytes = scale.small
    title = f"{parts:,} tensors of {write_nbytes(nbytes)}"
    found = [_moving(scale, "small", title, "blocks", scale.small)]
    for nbytes in scale.scattered_nbytes:
        shape = (max(1, scale.scattered_total // nbytes), nbytes)
        title = f"{shape[0]:,} scattered blocks of {write_nbytes(nbytes)}"
        name = f"scattered-{nbytes}"
        found.append(_moving(scale, name, title, "blocks", shape, scattered=True))
    return found


def _latencies(scale: Scale) -> list[Exhibit]:
    ping = Subject(
        "ping",
        f"{PING_NBYTES}-byte drop_select, round trip",
        "latency",
        "us",
        False,
        PING_NBYTES,
    )
    fetch = Subject(
        "fetch",
        f"{write_nbytes(_FETCH_NBYTES)} fetch",
        "latency",
        "us",
        False,
        _FETCH_NBYTES,
    )
    return [
        Exhibit(ping, lambda rig: open_ping(rig, ping, scale.pings)),
        Exhibit(fetch, lambda rig: open_fetching(rig, fetch, scale.fetches)),
    ]


def _outstanding(scale: Scale, outstanding: int) -> Exhibit:
    subject = Subject(
        f"outstanding-{outstanding}",
        f"{write_nbytes(_REQUEST_NBYTES)} requests, {outstanding:,} outstanding",
        "concurrency",
        "requests/s",
        True,
        _REQUEST_NBYTES,
        outstanding=outstanding,
    )
    return Exhibit(subject, lambda rig: open_outstanding(rig, subject, scale.requests))


def _waits(scale: Scale) -> list[Exhibit]:
    parts, nbytes = scale.tail
    tail = Subject(
        "tail",
        f"layer-wise tail of {parts} layers of {write_nbytes(nbytes)}",
        "tail",
        "ms",
        False,
        nbytes,
        parts,
    )
    pairs = Subject(
        "pairs",
        f"insert and drop_select of {PING_NBYTES} bytes, in turns",
        "rate",
        "pairs/s",
        True,
        PING_NBYTES,
    )
    lag = Subject(
        "lag",
        f"loop lag p99 while entries of {write_nbytes(scale.entry)} move",
        "lag",
        "ms",
        False,
        scale.entry // 4,
        4,
    )
    return [
        Exhibit(tail, lambda rig: open_tail(rig, tail, scale.compute_s)),
        Exhibit(pairs, lambda rig: open_pairs(rig, pairs, scale.pairs)),
        Exhibit(lag, lambda rig: open_lag(rig, lag, scale.ticks)),
    ]

"""Which cases there are, in which order, and what they are called."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from asynckv.cli.bench.asking import open_outstanding, open_pairs, open_ping
from asynckv.cli.bench.lag import open_lag
from asynckv.cli.bench.layerwise import open_tail
from asynckv.cli.bench.measuring import Case
from asynckv.cli.bench.meeting import MAX_NBYTES, MAX_PARTS, PING_NBYTES
from asynckv.cli.bench.moving import open_fetching, open_moving
from asynckv.cli.bench.report import Group, Subject
from asynckv.cli.bench.rig import Rig
from asynckv.cli.bench.settings import Scale, Selection
from asynckv.cli.bench.wording import write_nbytes
from asynckv.errors import ConfigError
from asynckv.types import parse_bytes

__all__ = ("Exhibit", "catalogue", "choose", "read_shape")

_REQUEST_NBYTES = 16 * 2**10
_FETCH_NBYTES = 2 * 2**20
_MAX_REPEATS = 100
_MAX_TENSORS = 4096
_MOST_FOR_ANY = 64 * 2**20


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


def choose(selection: Selection, *, is_bench: bool = True) -> list[Exhibit]:
    """Return the cases that were chosen; of a server that is no bench, what it can do.

    :raises ConfigError: a name fits no case
    """
    scale = selection.scale
    known = [one for one in catalogue(scale) if is_bench or _suits_any_server(one)]
    found = [] if selection.shapes and not selection.cases else known
    if selection.cases:
        names = [one.subject.case for one in known]
        wanted = {name for case in selection.cases for name in _fitting(case, names)}
        found = [one for one in known if one.subject.case in wanted]
    for parts, nbytes in selection.shapes:
        title = f"{parts:,} {'tensor' if parts == 1 else 'tensors'} of "
        name = f"shape-{parts}x{nbytes}"
        shape = (parts, nbytes)
        title += write_nbytes(nbytes)
        found.append(_moving(scale, name, title, "throughput", shape))
    return found


def _suits_any_server(exhibit: Exhibit) -> bool:
    """Whether it needs little room, and no sockets of a bench."""
    subject = exhibit.subject
    return subject.parts * subject.part_nbytes <= _MOST_FOR_ANY and subject.group in (
        *("throughput", "blocks", "latency", "concurrency", "rate"),
    )


def _fitting(case: str, names: list[str]) -> list[str]:
    pattern = case
    kind, _, size = case.rpartition("-")
    if kind and size:  # entry-1MiB is entry-1048576
        with contextlib.suppress(ValueError):
            pattern = f"{kind}-{parse_bytes(size)}"
    if found := fnmatch.filter(names, pattern):
        return found
    raise ConfigError(f"no case fits {case!r}", hint=f"there are {', '.join(names)}")


def read_shape(text: str) -> tuple[int, int]:
    """Return tensors and bytes of each, of ``"32x2MiB"``.

    :raises ConfigError: it is no shape
    """
    parts, _, size = text.lower().partition("x")
    try:
        shape = int(parts), parse_bytes(size)
    except ValueError as exc:
        hint = "write how many tensors of how many bytes, as 32x2MiB"
        raise ConfigError(f"{text!r} is no shape", hint=hint) from exc
    if min(shape) < 1 or shape[0] > MAX_PARTS or shape[1] > MAX_NBYTES:
        hint = f"up to {MAX_PARTS:,} tensors of up to {write_nbytes(MAX_NBYTES)}"
        raise ConfigError(f"{text!r} cannot be measured", hint=hint)
    return shape


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

"""Payload lanes beside raw blocking sockets, in one run, over loopback.

Two processes; 1 GiB as 64 tensors of 16 MiB by ``drop_select(into=)`` into memory
that is there. Beside one lane stands one raw stream, beside four lanes four, each with
a thread of its own; beside four lanes of a unix socket, and beside TLS, one raw TCP
stream. Paired runs, each divided by its own A/A; CPU seconds are those of both
processes. Then the loop's lag while transfers go on and on, beside an idle loop's.

    python -m benchmarks.lanes [--runs 5] [--ticks 5000] [--only NAME] [--only-report]
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import asynckv
from asynckv.cli.bench.baselines import name_of_streams
from asynckv.cli.bench.cases import open_lag, open_moving
from asynckv.cli.bench.report import Settings, Subject, percentile
from asynckv.cli.bench.rig import Rig
from asynckv.cli.bench.rounds import measure
from asynckv.cli.process import run
from asynckv.links.options import Digest
from asynckv.testing.certificates import Authority
from benchmarks.pairing.processes import INLINE, own_rig
from benchmarks.pairing.runs import Figure, arguments_of, measure_case, report

__all__ = ("main",)

_LAYERS = Subject("layers", "1 GiB", "throughput", "GB/s", True, 16 * 2**20, 64)
_LAG_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to move the entry, beside so many raw streams, and its limits."""

    scheme: str
    lanes: int
    digest: Digest
    streams: int
    at_least: float | None = None
    cpu_at_most: float | None = None
    lag_p99_ms: float | None = None
    lag_max_ms: float | None = None


SETTINGS = {
    "tcp-1-full": Setting("tcp", 1, "full", 1, 0.85, 1.25, 2.0, 15.0),
    "tcp-1-off": Setting("tcp", 1, "off", 1, 0.9, 1.15),
    "tcp-4-full": Setting("tcp", 4, "full", 4, 0.75, None, 10.0),
    "tcp-4-off": Setting("tcp", 4, "off", 4, 0.85),
    "unix-4-full": Setting("unix", 4, "full", 1, 1.5),
    "map": Setting("map", 1, "auto", 1, None, None, 2.0, 15.0),
    "tls-1-full": Setting("tls", 1, "full", 1),
    "tls-4-full": Setting("tls", 4, "full", 1),
}


async def _measure(
    name: str, folder: str, keys: asynckv.TLS, runs: int, ticks: int
) -> list[Figure]:
    setting, figures = SETTINGS[name], list[Figure]()
    options = Settings(digest=setting.digest, lanes=setting.lanes)
    url, query = f"{setting.scheme}://127.0.0.1:0", INLINE
    if setting.scheme == "tls":
        options = dataclasses.replace(options, tls=keys)
    elif setting.scheme == "unix":
        url = f"unix://{Path(folder) / 'socket'}"
    elif setting.scheme == "map":
        url, query = "tcp://127.0.0.1:0", ""
    async with own_rig(options, url, query) as (rig, _):
        if runs:
            figures += await _measure_speed(rig, name, runs)
        if ticks and setting.lag_p99_ms is not None:
            figures += await _measure_lag(rig, name, ticks)
    return figures


async def _measure_speed(rig: Rig, name: str, runs: int) -> list[Figure]:
    setting, raw = SETTINGS[name], name_of_streams(SETTINGS[name].streams)
    async with open_moving(rig, _LAYERS, 1) as case:
        every = await measure_case(f"{name}, GB/s", case, runs=runs, beside=raw)
    found, what, most = every[raw], f"{name} CPU a byte / {raw}", setting.cpu_at_most
    return [
        Figure(f"{name} / {raw}", found.figure, at_least=setting.at_least),
        Figure(what, found.cpu_ratio, at_most=most),
    ]


async def _measure_lag(rig: Rig, name: str, ticks: int) -> list[Figure]:
    """Tick on an idle loop, and while transfers follow each other, in turns."""
    async with open_lag(rig, _LAYERS, ticks // _LAG_ROUNDS) as case:
        rounds = await measure(case, _LAG_ROUNDS, lambda _: None)
    busy_ms = [lag for one in rounds for lag in one.ours.calls]
    idle_ms = [lag for one in rounds for lag in one.baselines["idle loop"][0].calls]
    for what, lags in (("idle", idle_ms), ("busy", busy_ms)):
        p50, p99 = percentile(lags, 0.5), percentile(lags, 0.99)
        said = f"p50 {p50:.2f} p99 {p99:.2f} max {max(lags):.2f} ms"
        print(f"{name} lag, {what}, {len(lags)} ticks: {said}", flush=True)
    setting, what = SETTINGS[name], f"{name} loop lag above idle, ms"
    above_ms = percentile(busy_ms, 0.99) - percentile(idle_ms, 0.99)
    most_ms = max(busy_ms) - max(idle_ms)
    return [
        Figure(f"{what}, p99", above_ms, at_most=setting.lag_p99_ms),
        Figure(f"{what}, max", most_ms, at_most=setting.lag_max_ms),
    ]


async def _measure_all(names: Sequence[str], runs: int, ticks: int) -> list[Figure]:
    figures = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            keys = Authority(folder).issue()
            figures += await _measure(name, folder, keys, runs, ticks)
    return figures


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    given = arguments_of(__doc__, SETTINGS, runs=5, ticks=5000).parse_args()
    report(run(_measure_all(given.only, given.runs, given.ticks)), given)


if __name__ == "__main__":
    main()

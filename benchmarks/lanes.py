"""Payload lanes beside raw blocking sockets, in one run, over loopback.

Two processes; 1 GiB as 64 tensors of 16 MiB by ``drop_select(into=)`` into memory
that is there. Beside one lane stands one raw stream, beside four lanes four, each with
a thread of its own; beside four lanes of a unix socket, and beside TLS, one raw TCP
stream. Paired runs, each divided by its own A/A; CPU seconds are those of both
processes. Then the loop's lag while transfers go on and on, beside an idle loop's.

    python -m benchmarks.lanes [--runs 5] [--ticks 5000] [--only NAME] [--only-report]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence

import torch

from asynckv.cli.bench.cases import pull, tick, tick_beside
from asynckv.cli.bench.report import percentile
from asynckv.cli.bench.rig import Memory, Rig, open_rig
from asynckv.cli.bench.rounds import Sample
from asynckv.cli.bench.settings import Settings
from asynckv.cli.process import run
from asynckv.links.options import Digest
from benchmarks.pairing.runs import Figure, Runs, measure_runs, report
from benchmarks.pairing.serving import LARGE, NBYTES, TENSORS, Places, serving

__all__ = ("main",)

_GIGABYTES = TENSORS * NBYTES / 1e9


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to move the entry, beside so many raw streams, and its limits."""

    name: str
    scheme: str
    lanes: int
    digest: Digest
    streams: int
    at_least: float | None = None
    cpu_at_most: float | None = None
    lag_p99_ms: float | None = None
    lag_max_ms: float | None = None


SETTINGS = (
    Setting("tcp-1-full", "tcp", 1, "full", 1, 0.85, 1.25, 2.0, 15.0),
    Setting("tcp-1-off", "tcp", 1, "off", 1, 0.9, 1.15),
    Setting("tcp-4-full", "tcp", 4, "full", 4, 0.75, None, 10.0),
    Setting("tcp-4-off", "tcp", 4, "off", 4, 0.85),
    Setting("unix-4-full", "unix", 4, "full", 1, 1.5),
    Setting("map", "map", 1, "auto", 1, None, None, 2.0, 15.0),
    Setting("tls-1-full", "tls", 1, "full", 1),
    Setting("tls-4-full", "tls", 4, "full", 1),
)


@dataclasses.dataclass
class Found:
    """What one setting came to."""

    setting: Setting
    runs: Runs | None = None
    busy_ms: list[float] = dataclasses.field(default_factory=list)
    idle_ms: list[float] = dataclasses.field(default_factory=list)

    def figures(self) -> list[Figure]:
        """Return what is judged, and what is only said."""
        one, found = self.setting, []
        if self.runs is not None:
            raw = f"raw TCP, {one.streams} stream{'s' * (one.streams > 1)}"
            ratio, cpu = self.runs.figure, self.runs.cpu_ratio
            found = [
                Figure(f"{one.name} / {raw}", ratio, at_least=one.at_least),
                Figure(f"{one.name} CPU a byte / {raw}", cpu, at_most=one.cpu_at_most),
            ]
        if self.busy_ms:
            above = percentile(self.busy_ms, 0.99) - percentile(self.idle_ms, 0.99)
            most = max(self.busy_ms) - max(self.idle_ms)
            name = f"{one.name} loop lag above idle, ms"
            found += [
                Figure(f"{name}, p99", above, at_most=one.lag_p99_ms),
                Figure(f"{name}, max", most, at_most=one.lag_max_ms),
            ]
        return found


@contextlib.asynccontextmanager
async def _open(places: Places, setting: Setting) -> AsyncIterator[Rig]:
    options = Settings(digest=setting.digest, lanes=setting.lanes)
    if setting.scheme == "tls":
        options = dataclasses.replace(options, tls=places.keys)
    url = places.tcp.partition("?")[0]  # as peers of one host choose by themselves
    if setting.scheme != "map":
        url = getattr(places, setting.scheme)
    async with open_rig(url, options) as rig:
        yield rig


def _check(memory: Memory) -> None:
    wrong = [i for i, one in enumerate(memory.targets) if not bool((one == i).all())]
    if wrong:
        raise SystemExit(f"wrong bytes in {wrong}")


async def _measure(
    places: Places, setting: Setting, memory: Memory, *, runs: int
) -> Runs:
    views = memory.target_views
    async with _open(places, setting) as rig:
        memory.poison()
        await pull(rig.lookup, LARGE, memory)
        _check(memory)

        async def ours() -> Sample:
            elapsed_s = await pull(rig.lookup, LARGE, memory)
            return Sample(_GIGABYTES / elapsed_s, TENSORS * NBYTES)

        async def raw() -> Sample:
            pull_raw = rig.baselines.raw.pull
            elapsed_s = await rig.in_thread(pull_raw, views, setting.streams)
            return Sample(_GIGABYTES / elapsed_s, TENSORS * NBYTES)

        return await measure_runs(setting.name, ours, raw, rig.cpu_s, runs=runs)


async def _measure_lag(
    places: Places, found: Found, memory: Memory, ticks: int
) -> None:
    """Tick on an idle loop, and while transfers follow each other, in turns."""
    async with _open(places, found.setting) as rig:
        await pull(rig.lookup, LARGE, memory)
        for _ in range(5):
            found.idle_ms += await tick(ticks // 5)
            transfer = functools.partial(pull, rig.lookup, LARGE, memory)
            found.busy_ms += (await tick_beside(ticks // 5, transfer))[0]
    for what, lags in (("idle", found.idle_ms), ("busy", found.busy_ms)):
        p50, p99 = percentile(lags, 0.5), percentile(lags, 0.99)
        name = f"{found.setting.name} lag, {what}, {len(lags)} ticks"
        print(f"{name}: p50 {p50:.2f} p99 {p99:.2f} max {max(lags):.2f} ms", flush=True)


async def _measure_all(
    settings: Sequence[Setting], *, runs: int, ticks: int
) -> list[Figure]:
    targets = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(TENSORS)]
    memory = Memory(targets, targets)
    figures: list[Figure] = []
    with serving() as places:
        for setting in settings:
            found = Found(setting)
            if runs:
                found.runs = await _measure(places, setting, memory, runs=runs)
            if ticks and setting.lag_p99_ms is not None:
                await _measure_lag(places, found, memory, ticks)
            figures += found.figures()
    return figures


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ticks", type=int, default=5000)
    parser.add_argument("--only", nargs="+", choices=[one.name for one in SETTINGS])
    parser.add_argument("--only-report", action="store_true")
    given = parser.parse_args()
    chosen = [one for one in SETTINGS if not given.only or one.name in given.only]
    figures = run(_measure_all(chosen, runs=given.runs, ticks=given.ticks))
    report(figures, only_report=given.only_report)


if __name__ == "__main__":
    main()

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rich.console import Console

import asynckv
from asynckv.cli.bench import run as running
from asynckv.cli.bench.cases import Exhibit, catalogue
from asynckv.cli.bench.report import BenchReport, Selection, Settings, Subject
from asynckv.cli.bench.rig import Rig
from asynckv.cli.bench.rounds import (
    ROUNDS,
    Case,
    Measurement,
    Sample,
    measure_between,
)
from asynckv.cli.bench.run import (
    BenchDisplay,
    choose,
    closing_table,
    run_bench,
    run_case,
)
from asynckv.cli.bench.server import serving
from asynckv.errors import ConfigError, PeerLost


def chosen(**options: Any) -> list[str]:
    return [one.subject.case for one in choose(Selection(**options))]


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        (("ping",), ["ping"]),
        (("entry-1MiB", "lag"), ["entry-1048576", "lag"]),
        (
            ("outstanding-*", "outstanding-1"),
            [f"outstanding-{10**n}" for n in range(4)],
        ),
    ],
)
def test_cases_are_chosen_by_name_size_or_pattern(
    cases: tuple[str, ...], expected: list[str]
) -> None:
    assert chosen(cases=cases) == expected


def test_without_a_choice_all_cases_are_measured() -> None:
    assert chosen() == [one.subject.case for one in catalogue(quick=False)]


def test_a_name_that_fits_no_case_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no case fits 'pong' .*there are .*ping"):
        choose(Selection(cases=("pong",)))


def test_a_shape_of_one_s_own_is_a_case_alone_or_beside_named_ones() -> None:
    shapes = ("32x2MiB",)
    assert chosen(shapes=shapes) == ["shape-32x2097152"]
    assert chosen(shapes=shapes, cases=("ping",)) == ["ping", "shape-32x2097152"]


@pytest.mark.parametrize("text", ["32", "x2MiB", "0x1KiB", "1x0", "1x2lots", "2x1TiB"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no shape|cannot be measured"):
        chosen(shapes=(text,))


def test_of_a_server_that_is_no_bench_less_is_asked() -> None:
    found = choose(Selection(), is_bench=False)
    names = {one.subject.case for one in found}
    assert {"ping", "pairs", "entry-67108864"} <= names
    assert not {"layers", "lag", "tail"} & names


def test_every_case_has_at_least_five_rounds_and_an_even_number() -> None:
    assert ROUNDS >= 5
    assert ROUNDS % 2 == 0


SUBJECT = Subject("one", "one", "rate", "pairs/s", True, 64)


async def steady() -> Sample:
    return Sample(1.0)


async def lost() -> Sample:
    raise PeerLost("gone")


def exhibit(measurement: Measurement) -> Exhibit:
    async def no_cpu() -> float:
        return 0.0

    @contextlib.asynccontextmanager
    async def opened(rig: Rig, subject: Subject, amount: int) -> AsyncIterator[Case]:
        beside = {"raw": steady}
        yield Case(lambda: measure_between(measurement, beside, no_cpu))

    return Exhibit(SUBJECT, opened, 1)


def display(*, terminal: bool = False) -> BenchDisplay:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    return BenchDisplay(console)


def printed(on: BenchDisplay) -> str:
    assert isinstance(on.console.file, io.StringIO)
    return on.console.file.getvalue()


async def test_a_case_is_measured_and_judged(rig: Rig) -> None:
    told = display()
    row = await run_case(rig, exhibit(steady), Selection(), told)
    assert (row.verdict, row.rounds) == ("ok", 6)
    assert printed(told).startswith("one  1 [1-1] pairs/s  ok")


async def test_a_case_that_fails_is_a_row_that_says_why(rig: Rig) -> None:
    told = display()
    row = await run_case(rig, exhibit(lost), Selection(), told)
    assert (row.verdict, row.ours) == ("failed", None)
    assert row.reason.startswith("PeerLost: gone")
    assert "FAILED: PeerLost: gone" in printed(told)


async def test_a_server_of_one_s_own_is_measured_without_baselines() -> None:
    selection = Selection(quick=True, cases=("ping", "entry-1MiB"))
    async with (
        asynckv.LookupBuffer("4MiB", drain_s=0) as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):
        report = await run_bench(server.url, Settings(), display(), selection)
        assert buffer.statistics().entries == 0
    moved, asked = report.rows
    assert [one.name for one in moved.baselines] == ["memcpy"]
    assert (asked.baselines, asked.rounds, report.is_bench) == ((), 6, False)


async def test_a_server_that_has_no_room_fails_the_row_in_time(
    plain_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_PATIENCE_S", 0.0)

    async def forever() -> Sample:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    row = await run_case(plain_rig, exhibit(forever), Selection(), display())
    assert (row.verdict, "has that server room?" in row.reason) == ("failed", True)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_run_has_a_row_for_every_case() -> None:
    async with serving("tcp://127.0.0.1:0", Settings()) as url:
        report = await run_bench(url, Settings(), display(), Selection(quick=True))
    assert [row.reason for row in report.rows if row.verdict == "failed"] == []
    assert len(report.rows) == len(catalogue(quick=True))
    assert all(row.baselines and row.rounds == 6 for row in report.rows)
    assert (report.own_server, report.quick, report.scheme) == (False, True, "tcp")


def shown(report: BenchReport, *, terminal: bool) -> str:
    on = display(terminal=terminal)
    with on.progress:
        on.expect(len(report.rows), Selection(seconds=34))
        for row in report.rows:
            on.begin(row.subject.title, 6)
            on.advance(3)
            on.end(row)
    return printed(on)


def test_every_row_is_printed_with_its_baselines(sample_report: BenchReport) -> None:
    lines = shown(sample_report, terminal=False).splitlines()
    assert lines[6] == "<entry>  3 [2.7-3.3] GB/s  ok"
    assert lines[7].strip().startswith("1.1 times slower than raw TCP")
    assert lines[8].strip().startswith("5.3 times slower than memcpy")
    assert lines[-1].endswith("FAILED: PeerLost: the peer is gone")


def test_it_says_first_what_it_takes_and_what_else_there_is(
    sample_report: BenchReport,
) -> None:
    first = shown(sample_report, terminal=False).splitlines()[0]
    assert first.startswith("5 cases, about 3 minutes on an idle machine; --quick")
    assert "takes 6 s, --case NAME" in first


def test_a_table_closes_the_run(sample_report: BenchReport) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(closing_table(sample_report))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    expected = "<entry> 3 GB/s 1.1 times slower than raw TCP ok"
    assert " ".join(lines[1].split()) == expected
    assert len(lines) == 6


@pytest.mark.parametrize("words", ["cases", "5/5", "3/6", "<entry>"])
def test_a_terminal_sees_how_it_goes_on(sample_report: BenchReport, words: str) -> None:
    assert words in shown(sample_report, terminal=True)


def test_no_bar_where_there_is_no_terminal(sample_report: BenchReport) -> None:
    assert "━" not in shown(sample_report, terminal=False)

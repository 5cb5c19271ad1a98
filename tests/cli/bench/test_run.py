from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

import asynckv
from asynckv.cli.bench import catalogue as running
from asynckv.cli.bench.catalogue import (
    Exhibit,
    catalogue,
    choose,
    read_shape,
    run_bench,
    run_case,
)
from asynckv.cli.bench.report import Row, Subject
from asynckv.cli.bench.rig import Rig
from asynckv.cli.bench.rounds import Case, Sample
from asynckv.cli.bench.server import serving
from asynckv.cli.bench.settings import FULL, QUICK, Scale, Selection, Settings
from asynckv.errors import ConfigError, PeerLost

CASES = {exhibit.subject.case: exhibit.subject for exhibit in catalogue(FULL)}


def test_every_promised_case_is_there() -> None:
    promised = {
        "layers",
        "small",
        "ping",
        "fetch",
        "outstanding-1000",
        "scattered-18432",
        "tail",
        "pairs",
        "lag",
    }
    assert promised <= set(CASES)


def test_titles_say_what_moves() -> None:
    assert CASES["layers"].title == "1 GiB as 64 layers of 16 MiB"
    assert CASES["small"].title == "10,000 tensors of 4 KiB"
    assert CASES[f"entry-{64 * 2**20}"].title == "64 MiB entry"


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_no_two_cases_have_the_same_name(scale: Scale) -> None:
    names = [exhibit.subject.case for exhibit in catalogue(scale)]
    assert len(names) == len(set(names))


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
    assert chosen() == list(CASES)


def test_a_name_that_fits_no_case_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no case fits 'pong' .*there are .*ping"):
        choose(Selection(cases=("pong",)))


def test_a_shape_of_one_s_own_is_a_case_alone_or_beside_named_ones() -> None:
    shapes = (read_shape("32x2MiB"),)
    assert shapes == ((32, 2 * 2**20),)
    assert chosen(shapes=shapes) == ["shape-32x2097152"]
    assert chosen(shapes=shapes, cases=("ping",)) == ["ping", "shape-32x2097152"]


@pytest.mark.parametrize("text", ["32", "x2MiB", "0x1KiB", "1x0", "1x2lots", "2x1TiB"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_shape(text)


def test_of_a_server_that_is_no_bench_less_is_asked() -> None:
    found = choose(Selection(), is_bench=False)
    names = {one.subject.case for one in found}
    assert {"ping", "pairs", "entry-67108864"} <= names
    assert not {"layers", "lag", "tail"} & names


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_every_case_has_at_least_five_rounds_and_an_even_number(scale: Scale) -> None:
    assert scale.rounds >= 5
    assert scale.rounds % 2 == 0


def test_the_full_scale_is_what_was_promised() -> None:
    mib = 2**20
    assert (FULL.entry, FULL.layers) == (64 * mib, (64, 16 * mib))
    assert FULL.small == (10_000, 4096)
    assert FULL.outstanding == (1, 10, 100, 1000)
    assert FULL.scattered_nbytes == (4096, 8192, 18432, 65536, 2 * mib)
    assert FULL.rounds * FULL.ticks >= 5000


SUBJECT = Subject("one", "one", "rate", "pairs/s", True, 64)


class Noting:
    """Progress that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def expect(self, cases: int, about_s: float, quick_s: float) -> None:
        self.told.append(cases)

    def begin(self, title: str, steps: int) -> None:
        self.told.append(title)

    def advance(self, steps: int) -> None:
        self.told.append(steps)

    def end(self, row: Row) -> None:
        self.told.append(row.verdict)


async def steady() -> Sample:
    return Sample(1.0)


async def lost() -> Sample:
    raise PeerLost("gone")


def exhibit(case: Case) -> Exhibit:
    @contextlib.asynccontextmanager
    async def opened(_: Rig) -> AsyncIterator[Case]:
        yield case

    return Exhibit(SUBJECT, opened)


async def test_a_case_is_measured_and_judged(rig: Rig) -> None:
    progress = Noting()
    case = exhibit(Case(steady, {"raw": steady}))
    row = await run_case(rig, case, Selection(), progress)
    assert (row.verdict, row.rounds) == ("ok", 6)
    assert progress.told == ["one", *range(7), "ok"]


async def test_a_case_that_fails_is_a_row_that_says_why(rig: Rig) -> None:
    progress = Noting()
    row = await run_case(
        rig, exhibit(Case(lost, {"raw": steady})), Selection(), progress
    )
    assert (row.verdict, row.ours) == ("failed", None)
    assert row.reason.startswith("PeerLost: gone")
    assert progress.told[-1] == "failed"


async def test_a_server_of_one_s_own_is_measured_without_baselines() -> None:
    selection = Selection(quick=True, cases=("ping", "entry-1MiB"))
    async with (
        asynckv.LookupBuffer("4MiB", drain_s=0) as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):
        report = await run_bench(server.url, Settings(), Noting(), selection)
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

    case = exhibit(Case(forever, {}))
    row = await run_case(plain_rig, case, Selection(), Noting())
    assert (row.verdict, "has that server room?" in row.reason) == ("failed", True)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_run_has_a_row_for_every_case() -> None:
    progress = Noting()
    async with serving("tcp://127.0.0.1:0", Settings()) as url:
        report = await run_bench(url, Settings(), progress, Selection(quick=True))
    assert [row.reason for row in report.rows if row.verdict == "failed"] == []
    assert len(report.rows) == progress.told[0]
    assert all(row.baselines and row.rounds == 6 for row in report.rows)
    assert (report.own_server, report.quick, report.scheme) == (False, True, "tcp")

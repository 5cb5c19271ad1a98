from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import asynckv
from asynckv.cli.bench import catalogue as running
from asynckv.cli.bench.catalogue import Exhibit, run_bench, run_case
from asynckv.cli.bench.report import Row, Subject
from asynckv.cli.bench.rig import Rig
from asynckv.cli.bench.rounds import Case, Sample
from asynckv.cli.bench.server import serving
from asynckv.cli.bench.settings import Selection, Settings
from asynckv.errors import PeerLost

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

from __future__ import annotations

import asyncio
import logging

import pytest

from asynckv.observability import waits
from asynckv.observability.waits import LONG_WAIT_S, LoggedWait, LoggedWaits
from asynckv.testing.blocked import until


async def test_logs_once_at_debug_when_it_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, waits.logger.name)
    with LoggedWait("somebody", "room", "an insert"):
        await asyncio.sleep(0)
    assert caplog.messages == ["somebody waits for room; it ends with an insert"]


async def test_warns_once_when_it_has_become_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LONG_WAIT_S == 30
    monkeypatch.setattr(waits, "LONG_WAIT_S", 0.001)
    with LoggedWait("somebody", "room", "an insert"):
        await until(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "somebody has waited 0 s for room; it ends with an insert" in record.message


async def test_what_ends_in_time_warns_of_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "LONG_WAIT_S", 0.001)
    with LoggedWait("somebody", "room", "an insert"):
        pass
    with LoggedWait("another", "room", "an insert"):
        await until(lambda: bool(caplog.records))
    assert [r.message.split()[0] for r in caplog.records] == ["another"]


async def test_waits_of_one_kind_are_logged_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, waits.logger.name)
    many = LoggedWaits("query {}".format, "a match", "an insert")
    for number in (1, 2):
        many.begin(number)
        assert len(many) == 1
        many.end(number)
    assert not many
    assert caplog.messages == [
        "query 1 waits for a match; it ends with an insert",
        "query 2 waits for a match; it ends with an insert",
    ]


async def test_of_waits_of_one_kind_only_the_long_ones_warn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "LONG_WAIT_S", 0.001)
    many = LoggedWaits("query {}".format, "a match", "an insert")
    many.begin(1)
    many.end(1)
    many.begin(2)
    await until(lambda: bool(caplog.records))
    many.begin(3)
    await until(lambda: len(caplog.records) == 2)
    assert len(many) == 2
    many.end(3)
    assert len(many) == 1
    assert {r.levelno for r in caplog.records} == {logging.WARNING}
    assert [m.partition(" has")[0] for m in caplog.messages] == ["query 2", "query 3"]


async def test_one_that_has_not_waited_long_enough_is_looked_at_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "LONG_WAIT_S", 0.001)
    many = LoggedWaits("query {}".format, "a match", "an insert")
    many.begin(1)
    monkeypatch.setattr(waits, "LONG_WAIT_S", 0.02)
    await until(lambda: bool(caplog.records))
    assert caplog.messages[0].startswith("query 1 has waited") and len(many) == 1


async def test_where_many_become_long_at_once_others_have_their_turn_in_between(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "LONG_WAIT_S", 0.001)
    many = LoggedWaits("query {}".format, "a match", "an insert")
    for number in range(200):
        many.begin(number)
    counts = set[int]()

    def are_all_told() -> bool:
        counts.add(len(caplog.records))
        return len(caplog.records) == 200

    await until(are_all_told)
    assert len(counts) > 3


async def test_who_waits_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, waits.logger.name)
    with LoggedWait("select of x\nCRITICAL", "room", "an insert"):
        pass
    assert caplog.messages[0].isprintable()

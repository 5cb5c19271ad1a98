from __future__ import annotations

import inspect

from asynckv.buffers.lookup import LookupBuffer
from harness.cancellations.coroutines import (
    ONE_STEP,
    codes_of_coroutines,
    public_coroutines,
    uncovered,
)
from harness.cancellations.everything import SCENARIOS

NAMES = {name for name, _, _ in public_coroutines()}
COVERED = [name for scenario in SCENARIOS for name in scenario.covers]


def test_every_public_coroutine_is_cancelled_by_some_scenario() -> None:
    assert uncovered(COVERED) == []


def test_a_coroutine_that_no_scenario_is_about_is_told() -> None:
    left = [name for name in COVERED if name != "KVPipe.flush"]
    assert uncovered(left) == ["KVPipe.flush", "Pipe.flush"]


def test_every_kind_of_coroutine_is_found() -> None:
    expected = {
        "connect",  # a function that returns what is entered
        "join_group",  # and a context manager
        "KVLookupBuffer.drop_select",  # a method that returns what is awaited
        "LookupBuffer.open_insert",  # a generator that is entered
        "RemoteStream.__anext__",  # an iteration of a class that nobody names
        "PipeListener.accept",  # of a class that is only returned
        "InlineTransport.quiesce",
        "KVLookupBuffer.insert",
    }
    assert expected <= NAMES


def test_what_returns_at_once_is_none() -> None:
    for name in ("Group.pipe_to", "LookupBuffer.statistics", "Pipe.abort"):
        assert name not in NAMES


def test_what_is_covered_exists() -> None:
    known = {alias for _, names, _ in public_coroutines() for alias in names}
    known |= {name for name, _, _ in public_coroutines()}
    assert [name for name in COVERED if name not in known] == []


def test_codes_are_of_what_runs() -> None:
    codes = codes_of_coroutines()
    assert codes["LookupBuffer.insert"] is LookupBuffer.insert.__code__
    generator = inspect.unwrap(LookupBuffer.open_insert)
    assert codes["LookupBuffer.open_insert"] is generator.__code__
    assert "KVLookupBuffer.insert" not in codes  # a contract does not run


def test_what_runs_behind_a_function_that_only_returns_is_found() -> None:
    assert {
        "open: _opened",
        "open_pipe: _opened",
        "join_group: _joined",
        "LookupBuffer.drop_select: LocalConsumer.take",
        "RemoteLookupBuffer.drop_select: RemoteConsumer.borrow",
    } <= set(codes_of_coroutines())


def test_what_takes_one_step_exists() -> None:
    known = {alias for _, names, _ in public_coroutines() for alias in names}
    assert {name for name in ONE_STEP if not name.endswith("__aenter__")} <= known

"""No public coroutine is left out of the scenarios, and what they name exists."""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.p2p.load import P2PLoad
from harness.cancellations import coroutines, everything
from harness.cancellations.connectors import (
    coroutines as coroutines_of_connectors,
    everything as everything_of_connectors,
)

FOUND: dict[str, Any] = {
    "buffers": coroutines,
    "connectors": coroutines_of_connectors,
}
COVERED = {
    "buffers": [name for one in everything.SCENARIOS for name in one.covers],
    "connectors": [
        name for one in everything_of_connectors.SCENARIOS for name in one.covers
    ],
}


@pytest.mark.parametrize(
    ("part", "left_out", "uncovered"),
    [
        ("buffers", "", []),
        ("connectors", "", []),
        ("buffers", "KVPipe.flush", ["KVPipe.flush", "Pipe.flush"]),
        ("connectors", "StoreWorker.flush", ["StoreWorker.flush"]),
    ],
)
def test_a_coroutine_that_no_scenario_is_about_is_told(
    part: str, left_out: str, uncovered: list[str]
) -> None:
    covered = [name for name in COVERED[part] if name != left_out]
    assert FOUND[part].uncovered(covered) == uncovered


@pytest.mark.parametrize("part", FOUND)
def test_what_is_covered_or_takes_one_step_exists(part: str) -> None:
    known: set[str] = set()
    for name, names, _ in FOUND[part].public_coroutines():
        known |= {name, *names}
    one_step = [n for n in FOUND[part].ONE_STEP if not n.endswith("__aenter__")]
    assert {*COVERED[part], *one_step} <= known


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("buffers", "connect"),  # a function that returns what is entered
        ("buffers", "join_group"),  # and a context manager
        ("buffers", "KVLookupBuffer.drop_select"),  # it returns what is awaited
        ("buffers", "LookupBuffer.open_insert"),  # a generator that is entered
        ("buffers", "RemoteStream.__anext__"),  # of a class that nobody names
        ("buffers", "PipeListener.accept"),  # of a class that is only returned
        ("buffers", "InlineTransport.quiesce"),
        ("buffers", "KVLookupBuffer.insert"),
        ("connectors", "release"),
        ("connectors", "KVConnectorWorker.shutdown"),
        ("connectors", "PackedBlocks.gather"),
    ],
)
def test_every_kind_of_coroutine_is_found(part: str, name: str) -> None:
    assert name in {found for found, _, _ in FOUND[part].public_coroutines()}


@pytest.mark.parametrize(
    "name", ["Group.pipe_to", "LookupBuffer.statistics", "Pipe.abort"]
)
def test_what_returns_at_once_is_no_coroutine(name: str) -> None:
    assert name not in {found for found, _, _ in coroutines.public_coroutines()}


@pytest.mark.parametrize(
    ("part", "name", "code"),
    [
        ("buffers", "LookupBuffer.insert", LookupBuffer.insert.__code__),
        (
            "buffers",
            "LookupBuffer.open_insert",
            inspect.unwrap(LookupBuffer.open_insert).__code__,
        ),
        ("buffers", "KVLookupBuffer.insert", None),  # a contract does not run
        ("connectors", "P2PLoad.run", P2PLoad.run.__code__),
        ("connectors", "KVConnectorWorker.wait_for_save", None),
    ],
)
def test_codes_are_of_what_runs(part: str, name: str, code: CodeType | None) -> None:
    assert FOUND[part].codes_of_coroutines().get(name) is code


def test_what_runs_behind_a_function_that_only_returns_is_found() -> None:
    assert {
        "open: _opened",
        "open_pipe: _opened",
        "join_group: _joined",
        "LookupBuffer.drop_select: LocalConsumer.take",
        "RemoteLookupBuffer.drop_select: RemoteConsumer.borrow",
    } <= set(coroutines.codes_of_coroutines())

"""No public coroutine is left out of the scenarios, and what they name exists."""

from __future__ import annotations

import inspect
from types import CodeType

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.p2p.load import P2PLoad
from harness.cancellations.coroutines import OF_BUFFERS, OF_CONNECTORS, Coroutines
from harness.cancellations.everything import (
    OF_CONNECTORS as SCENARIOS_OF_CONNECTORS,
    SCENARIOS,
)

COVERED = {
    OF_BUFFERS: [name for one in SCENARIOS for name in one.covers],
    OF_CONNECTORS: [name for one in SCENARIOS_OF_CONNECTORS for name in one.covers],
}


@pytest.mark.parametrize(
    ("part", "left_out", "uncovered"),
    [
        (OF_BUFFERS, "", []),
        (OF_CONNECTORS, "", []),
        (OF_BUFFERS, "KVPipe.flush", ["KVPipe.flush", "Pipe.flush"]),
        (OF_CONNECTORS, "StoreWorker.flush", ["StoreWorker.flush"]),
    ],
)
def test_a_coroutine_that_no_scenario_is_about_is_told(
    part: Coroutines, left_out: str, uncovered: list[str]
) -> None:
    assert part.uncovered({*COVERED[part]} - {left_out}) == uncovered


@pytest.mark.parametrize("part", COVERED)
def test_what_is_covered_or_takes_one_step_exists(part: Coroutines) -> None:
    known = {one for name, names, _ in part.find() for one in (name, *names)}
    one_step = [n for n in part.one_step if not n.endswith("__aenter__")]
    assert {*COVERED[part], *one_step} <= known


def test_every_kind_of_coroutine_is_found_and_nothing_else() -> None:
    buffers = {name for name, _, _ in OF_BUFFERS.find()}
    assert buffers >= {
        *("connect", "join_group"),  # they return what is entered
        *("KVLookupBuffer.insert", "InlineTransport.quiesce"),
        "KVLookupBuffer.drop_select",  # it returns what is awaited
        "LookupBuffer.open_insert",  # a generator that is entered
        "RemoteStream.__anext__",  # of a class that nobody names
        "PipeListener.accept",  # of a class that is only returned
    }
    assert not buffers & {"Group.pipe_to", "LookupBuffer.statistics", "Pipe.abort"}
    assert {name for name, _, _ in OF_CONNECTORS.find()} >= {
        *("release", "KVConnectorWorker.shutdown", "PackedBlocks.gather"),
    }


@pytest.mark.parametrize(
    ("part", "name", "code"),
    [
        (OF_BUFFERS, "LookupBuffer.insert", LookupBuffer.insert.__code__),
        (
            OF_BUFFERS,
            "LookupBuffer.open_insert",
            inspect.unwrap(LookupBuffer.open_insert).__code__,
        ),
        (OF_BUFFERS, "KVLookupBuffer.insert", None),  # a contract does not run
        (OF_CONNECTORS, "P2PLoad.run", P2PLoad.run.__code__),
        (OF_CONNECTORS, "KVConnectorWorker.wait_for_save", None),
    ],
)
def test_codes_are_of_what_runs(
    part: Coroutines, name: str, code: CodeType | None
) -> None:
    assert part.codes().get(name) is code


def test_what_runs_behind_a_function_that_only_returns_is_found() -> None:
    assert OF_BUFFERS.codes().keys() >= {
        *("open: _opened", "open_pipe: _opened", "join_group: _joined"),
        "LookupBuffer.drop_select: LocalConsumer.take",
        "RemoteLookupBuffer.drop_select: RemoteConsumer.borrow",
    }

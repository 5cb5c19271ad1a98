from __future__ import annotations

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.transports.nccl.lives import Life


def opened() -> Life:
    life = Life()
    life.begin(1)
    life.meet(1)
    life.meet(1, is_peer=True)
    return life


def test_a_pipe_is_open_when_both_sides_have_met() -> None:
    life = Life()
    life.begin(1)
    assert not life.meet(1, is_peer=True)
    assert life.meet(1)
    assert life.state == "open"


def test_a_broken_pipe_is_over_when_both_sides_are_quiet() -> None:
    life = opened()
    assert life.fail(1)
    assert not life.quiet(1)
    assert life.is_quiet_here and not life.may_open
    assert life.quiet(1, is_peer=True)
    assert life.may_open


def test_it_fails_once_a_generation() -> None:
    life = opened()
    assert life.fail(1)
    assert not life.fail(1)
    assert not opened().fail(2)


def test_failures_are_counted_until_it_is_open_again() -> None:
    life = opened()
    for generation in (1, 2, 3):
        life.fail(generation)
        life.quiet(generation)
        life.quiet(generation, is_peer=True)
        life.begin(generation + 1)
    assert life.failures == 3
    life.meet(4)
    life.meet(4, is_peer=True)
    assert life.failures == 0


@pytest.mark.parametrize("generation", [0, 2])
def test_generations_follow_one_another(generation: int) -> None:
    with pytest.raises(RemoteProtocolError, match="generation"):
        Life().begin(generation)


def test_what_is_open_is_not_opened() -> None:
    with pytest.raises(RemoteProtocolError, match="is open as 1"):
        opened().begin(2)


def test_what_comes_too_late_changes_nothing() -> None:
    life = opened()
    assert not life.meet(1)
    assert not life.quiet(1)
    assert life.state == "open"

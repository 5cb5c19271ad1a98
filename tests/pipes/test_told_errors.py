from __future__ import annotations

import pytest

from asynckv.errors import ChecksumError, PeerLost, PipeBroken
from asynckv.pipes.pipe import ToldErrors

LOST = PipeBroken("the peer is lost", maybe_delivered=0)
LOST_WITH_SOME = PipeBroken("the peer is lost", maybe_delivered=1)


def test_nobody_has_heard_of_anything_at_first_and_then_of_it_once() -> None:
    told = ToldErrors()
    assert not told.has(LOST)
    assert told.has(LOST) and told.has(LOST_WITH_SOME)


@pytest.mark.parametrize("error", [PeerLost("gone"), ChecksumError("changed")])
def test_who_has_heard_of_a_loss_has_not_heard_what_may_not_have_arrived(
    error: Exception,
) -> None:
    told = ToldErrors()
    told.note(error)
    assert not told.has(LOST_WITH_SOME)
    told = ToldErrors()
    told.note(error)
    assert told.has(LOST)


def test_another_error_tells_nothing_of_the_end() -> None:
    told = ToldErrors()
    told.note(ValueError("no tensor"))
    assert not told.has(LOST)


def test_who_has_hung_up_is_told_nothing() -> None:
    told = ToldErrors()
    told.note_all()
    assert told.has(LOST_WITH_SOME)

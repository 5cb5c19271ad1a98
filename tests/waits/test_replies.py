from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import AsyncKVError, PeerLost, RemoteProtocolError
from asynckv.links.requests import fail_by
from asynckv.protocol.frames import (
    Cancelled,
    Failure,
    Frame,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.testing.blocked import until_blocked
from asynckv.waits.replies import Reply


async def test_the_first_answer_counts() -> None:
    answer: Reply[int] = Reply()
    answer.give(1)
    answer.give(2)
    answer.fail(PeerLost("cut"))
    answer.check()
    assert answer.is_in and await answer == 1


async def test_a_failure_is_raised_by_who_waits_and_who_looks() -> None:
    answer: Reply[int] = Reply()
    answer.check()
    answer.fail(PeerLost("cut"))
    answer.give(1)
    with pytest.raises(PeerLost, match="cut"):
        answer.check()
    with pytest.raises(PeerLost, match="cut"):
        await answer


async def test_what_is_not_awaited_any_more_is_in() -> None:
    answer: Reply[int] = Reply()

    async def wait() -> int:
        return await answer

    task = asyncio.create_task(wait())
    await until_blocked(task)
    task.cancel()
    await asyncio.wait({task})
    answer.fail(PeerLost("cut"))
    answer.check()
    assert answer.is_in


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (Failure("KeyError", "who?"), KeyError),
        (Failure("RemoteProtocolError", "broken"), RemoteProtocolError),
        (Cancelled(), AsyncKVError),
    ],
)
def test_a_last_frame_that_is_no_answer_fails_the_request(
    frame: Frame, kind: type[Exception]
) -> None:
    errors: list[Exception] = []
    fail_by(frame, "question", errors.append)
    assert [type(error) for error in errors] == [kind]


def test_any_other_frame_breaks_the_link_too() -> None:
    errors: list[Exception] = []
    with pytest.raises(RemoteProtocolError, match="no Grant belongs here"):
        fail_by(Grant(1), "question", errors.append)
    assert isinstance(errors[0], RemoteProtocolError)

from __future__ import annotations

from typing import get_args

import pytest

from asynckv.protocol.frames import (
    Accepted,
    Frame,
    OpeningFrame,
    Ping,
    Proof,
    Took,
)
from asynckv.protocol.session import ROLES, Role
from asynckv.protocol.transfer_frames import Grant


def test_every_frame_has_a_role() -> None:
    assert ROLES.keys() == set(get_args(Frame))


def test_every_opening_frame_opens() -> None:
    opening = {frame for frame, role in ROLES.items() if role is Role.OPENS}
    assert opening == set(get_args(OpeningFrame))


@pytest.mark.parametrize(
    ("frame", "role"),
    [
        (Grant, Role.GOES_ON),
        (Took, Role.ASKS_LAST),
        (Accepted, Role.ANSWERS_LAST),
        (Ping, Role.OF_THE_LINK),
        (Proof, Role.OF_THE_LINK),
    ],
)
def test_a_frame_does_to_its_stream_what_it_is_for(frame: type, role: Role) -> None:
    assert ROLES[frame] is role

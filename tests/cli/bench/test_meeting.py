from __future__ import annotations

import pytest
import torch

from asynckv.cli.bench.baselines import (
    MAX_NBYTES,
    MAX_PARTS,
    ORDER,
    Meeting,
    What,
    meeting_as_tensor,
    meeting_from,
    read_order,
)


def test_a_meeting_survives_its_way_through_a_store() -> None:
    meeting = Meeting(1, 65535, 2, bytes(32))
    assert meeting_from(meeting_as_tensor(meeting)) == meeting


@pytest.mark.parametrize(
    "meeting",
    [
        Meeting(0, 1, 1, bytes(32)),
        Meeting(1, 65536, 1, bytes(32)),
        Meeting(1, 1, 0, bytes(32)),
        Meeting(1, 1, 1, b""),
    ],
)
def test_what_cannot_be_a_meeting_is_refused(meeting: Meeting) -> None:
    with pytest.raises(ValueError, match="no meeting"):
        meeting_from(meeting_as_tensor(meeting))


def test_other_bytes_are_no_meeting() -> None:
    with pytest.raises(ValueError):
        meeting_from(torch.zeros(3, dtype=torch.uint8))


def test_an_order_is_read_as_it_was_written() -> None:
    assert read_order(ORDER.pack(What.PUSH, 3, 64)) == (What.PUSH, 3, 64)


@pytest.mark.parametrize(
    ("what", "parts", "nbytes"),
    [(9, 1, 1), (1, MAX_PARTS + 1, 1), (1, 1, MAX_NBYTES + 1)],
)
def test_an_order_beyond_the_bounds_is_refused(
    what: int, parts: int, nbytes: int
) -> None:
    with pytest.raises(ValueError):
        read_order(ORDER.pack(what, parts, nbytes))

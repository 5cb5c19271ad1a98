from __future__ import annotations

import pytest

from asynckv.errors import GPUFailed
from harness.fake_gpus.wires import Meetings


@pytest.mark.parametrize("by_sockets", [False, True])
def test_what_one_rank_says_the_other_hears_in_order(by_sockets: bool) -> None:
    meetings = Meetings(by_sockets=by_sockets)
    unique_id = meetings.unique_id()
    ends = [meetings.join(unique_id, rank) for rank in range(2)]
    heard: list[bytes] = []
    for number in range(3):
        ends[0].tell(b"x" * number)
    while len(heard) < 3:
        ends[0].hear()  # what it could not send yet leaves when it is looked at
        heard += ends[1].hear()
    assert heard == [b"", b"x", b"xx"]
    for end in ends:
        end.close()
    meetings.close()


def test_nobody_is_where_a_meeting_was_closed() -> None:
    meetings = Meetings(by_sockets=True)
    unique_id = meetings.unique_id()
    meetings.close()
    with pytest.raises(GPUFailed, match="nobody is at"):
        meetings.join(unique_id, 1)

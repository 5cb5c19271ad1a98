from __future__ import annotations

import pytest

from asynckv.errors import PeerLost
from asynckv.testing import until
from asynckv.testing.transport_pairs import (
    TRANSPORT_KINDS,
    TransportKind,
    open_transport_pair,
)


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", TRANSPORT_KINDS)
async def test_the_side_that_is_left_hears_of_it(kind: TransportKind) -> None:
    lost: list[list[Exception]] = [[], []]
    opening = open_transport_pair(kind, lost[0].append, lost[1].append)
    async with opening as (near, far):
        target = bytearray(4)
        far.receive(1, 0, memoryview(target), lambda *_: None)
        near.abort()
        await until(lambda: bool(lost[1]))
    assert lost[0] == []
    assert [type(error) for error in lost[1]] == [PeerLost]

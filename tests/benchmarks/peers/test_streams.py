from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from benchmarks.peers.peer import Peer
from benchmarks.peers.streams import AnyioStreams, Streams, StreamsRead
from benchmarks.peers.work import QUICK, Pool


@pytest.fixture(params=[Streams, StreamsRead, AnyioStreams])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Peer, Peer]]:
    """Both ends of a peer that every environment has."""
    source = request.param(Pool.source(QUICK), QUICK)
    target = request.param(Pool.target(QUICK), QUICK)
    await target.connect(await source.serve())
    yield source, target
    await target.aclose()
    await source.aclose()


async def test_every_work_lands_in_its_places(ends: tuple[Peer, Peer]) -> None:
    source, target = ends
    for work in QUICK:
        target.pool.poison()
        await target.pull(work)
        target.pool.check(work, source.pool)


async def test_a_ping_comes_back(ends: tuple[Peer, Peer]) -> None:
    source, target = ends
    for _ in range(3):
        await target.ping(QUICK[-1])
    target.pool.check(QUICK[-1], source.pool)

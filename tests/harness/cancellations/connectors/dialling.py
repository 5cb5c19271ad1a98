"""Peers that are dialled when they are needed: one link each, or none."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from asynckv.connectors.connections import PeerConnection, Peers
from asynckv.connectors.engine import KVEngine
from asynckv.errors import PeerLost
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_error
from harness.cancellations.connectors.grounds import P2PGround, Side
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.partners import Closing
from harness.cancellations.sweeper import Sweeper, ticks

__all__ = (
    "DIALLING",
    "a_peer_that_is_dialled",
    "a_peer_that_is_found",
    "the_peers_end",
)

_ENGINE: Final = KVEngine(engine_id="finder", block_size=16)


async def a_peer_that_is_found(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it can be found; by its name, and by asking who answers."""
    await _find(ground, sweeper, is_named=True)
    await _find(ground, sweeper, is_named=False)


async def _find(ground: P2PGround, sweeper: Sweeper, *, is_named: bool) -> None:
    side, served = _sides(ground)
    peers: Peers

    async def before() -> None:
        nonlocal peers
        peers = _new_peers(side, served, is_named=is_named)
        await sweeper.pause()

    async def check(outcome: Outcome[object]) -> None:
        found = await peers.find(served.engine_id, 0)
        expect(found.is_connected, "it was found, and is not connected")
        await peers.aclose()
        await ground.check_quiet()

    await sweeper.sweep(
        f"a peer that is {'named' if is_named else 'asked who it is'}",
        lambda: peers.find(served.engine_id, 0),
        check,
        before,
    )


async def a_peer_that_is_dialled(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it is dialled, or is not: the next call finds it."""
    side, served = _sides(ground)
    line: PeerConnection

    async def before() -> None:
        nonlocal line
        line = _new_peers(side, served, is_named=True).line(served.engine_id, 0)
        await sweeper.pause()

    async def check(outcome: Outcome[object]) -> None:
        found = await line.peer()
        expect(found is await line.peer(), "it was dialled twice")
        await line.aclose()
        expect(not line.is_connected, "it was closed, and is connected")
        await ground.check_quiet()

    await sweeper.sweep("a dial", lambda: line.peer(), check, before)


async def the_peers_end(ground: P2PGround, sweeper: Sweeper) -> None:
    """With one that is connected, one that is dialled, and one that was lost."""
    side, served = _sides(ground)
    peers: Peers
    closing: Closing

    async def before() -> None:
        nonlocal peers, closing
        closing = Closing()
        peers = _new_peers(side, served, is_named=True)
        (await peers.find(served.engine_id, 0)).abort()
        await peers.find(served.engine_id, 0)
        for rank in range(1, len(served.workers)):
            dialling = asyncio.create_task(peers.line(served.engine_id, rank).peer())
            await ticks(1)
            dialling.cancel()  # the dial goes on
            await asyncio.wait({dialling})
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            await peers.aclose()
        expect(not peers.connected, "they were closed, and are connected")
        await expect_error(PeerLost, peers.find(served.engine_id, 0))
        line = peers.line(served.engine_id, 0)
        await expect_error(PeerLost, line.peer())
        await ground.check_quiet()

    await sweeper.sweep(
        "the peers' end", lambda: closing.run(peers.aclose), check, before
    )


def _sides(ground: P2PGround) -> tuple[Side, Side]:
    """Who dials, and who is dialled."""
    if ground.direction == "push":
        return ground.prefill, ground.decode
    return ground.decode, ground.prefill


def _new_peers(side: Side, served: Side, *, is_named: bool) -> Peers:
    extra = dict(side.config.kv_connector_extra_config)
    if not is_named:
        options = side.workers[0].options
        extra["peers"] = [options.peers[served.engine_id][0]]
    config = msgspec.structs.replace(side.config, kv_connector_extra_config=extra)
    return Peers(config, _ENGINE)


DIALLING: Final[tuple[ConnectorScenario[P2PGround], ...]] = (
    ConnectorScenario(a_peer_that_is_found, ("Peers.find",)),
    ConnectorScenario(a_peer_that_is_dialled, ("PeerConnection.peer",)),
    ConnectorScenario(the_peers_end, ("Peers.aclose", "PeerConnection.aclose")),
)

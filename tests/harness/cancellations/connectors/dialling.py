"""Peers and workers begin and end: nothing is left open, and memory is quiet."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.connections import Peers
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import P2PMetadata
from asynckv.errors import PeerLost
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, expect_error
from harness.cancellations.connectors.grounds import (
    P2PGround,
    Side,
    ToyCaches,
    expect_quiet,
    has_let_go,
    urls_of,
)
from harness.cancellations.sweeper import Sweeper, scenario, ticks

__all__ = ("new_worker",)

_ENGINE: Final = KVEngine(engine_id="finder", block_size=16)


@scenario("Peers.find")
async def a_peer_that_is_found(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it can be found; by its name, and by asking who answers."""
    side, served = _sides(ground)
    for is_named in (True, False):
        async for cancel in sweeper.sweep("named" if is_named else "asked who it is"):
            peers = _new_peers(side, served, is_named=is_named)
            await cancel(peers.find, served.engine_id, 0)
            found = await peers.find(served.engine_id, 0)
            expect(found.is_connected, "it was found, and is not connected")
            await peers.aclose()


@scenario("PeerConnection.peer")
async def a_peer_that_is_dialled(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it is dialled, or is not: the next call finds it."""
    side, served = _sides(ground)
    async for cancel in sweeper.sweep():
        line = _new_peers(side, served).line(served.engine_id, 0)
        await cancel(line.peer)
        expect(await line.peer() is await line.peer(), "it was dialled twice")
        await line.aclose()
        expect(not line.is_connected, "it was closed, and is connected")


@scenario("Peers.aclose", "PeerConnection.aclose")
async def the_peers_end(ground: P2PGround, sweeper: Sweeper) -> None:
    """With one that is connected, one that is dialled, and one that was lost."""
    side, served = _sides(ground)
    async for cancel in sweeper.sweep():
        peers = _new_peers(side, served)
        (await peers.find(served.engine_id, 0)).abort()
        await peers.find(served.engine_id, 0)
        for rank in range(1, len(served.workers)):
            dialling = asyncio.create_task(peers.line(served.engine_id, rank).peer())
            await ticks(1)
            dialling.cancel()  # the dial goes on
            await asyncio.wait({dialling})
        await cancel(peers.aclose)
        if not cancel.has_begun:
            await peers.aclose()
        expect(not peers.connected, "they were closed, and are connected")
        await expect_error(PeerLost, peers.find(served.engine_id, 0))
        await expect_error(PeerLost, peers.line(served.engine_id, 0).peer())


def _sides(ground: P2PGround) -> tuple[Side, Side]:
    """Who dials, and who is dialled."""
    if ground.direction == "push":
        return ground.prefill, ground.decode
    return ground.decode, ground.prefill


def _new_peers(side: Side, served: Side, *, is_named: bool = True) -> Peers:
    extra = dict(side.config.kv_connector_extra_config)
    if not is_named:
        options = side.workers[0].options
        extra["peers"] = [options.peers[served.engine_id][0]]
    config = msgspec.structs.replace(side.config, kv_connector_extra_config=extra)
    return Peers(config, _ENGINE)


def new_worker(
    ground: P2PGround, side: Side, listen: str
) -> tuple[P2PWorker, ToyCaches]:
    """Return another worker as the first of ``side``, under another name."""
    config, first = side.config, side.workers[0].engine
    extra = {**config.kv_connector_extra_config, "listen": listen}
    engine = msgspec.structs.replace(first, engine_id=f"{side.engine_id}-2")
    worker = side.new_worker(
        msgspec.structs.replace(config, kv_connector_extra_config=extra), engine
    )
    if first.shape is None:
        raise RuntimeError("the engines here have a shape")
    place = (ground.prefill, ground.decode).index(side)
    caches = ToyCaches(ground.model, first.shape, 0, place, side.gpu)
    worker.register_kv_caches(caches.layers)
    return worker, caches


@scenario("P2PWorker.start", "P2PRoutes.open")
async def a_workers_start(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, nothing is open, and it can be started."""
    side = _sides(ground)[1]
    with urls_of(ground.scheme, 1) as ((url,),):
        async for cancel in sweeper.sweep():
            worker, _ = new_worker(ground, side, url)
            outcome = await cancel(worker.start)
            is_open = worker.routes.server is not None
            expect(outcome.cancelled or is_open == worker.routes.serves, "not open")
            await worker.start()
            await worker.aclose()


@scenario(
    *("P2PWorker.aclose", "KVConnectorWorker.shutdown"),
    *("P2PRoutes.aclose", "Transfers.aclose"),
    is_costly=True,
)
async def a_workers_end(ground: P2PGround, sweeper: Sweeper) -> None:
    """In the middle of a load or a save: memory is quiet, and everybody is told."""
    for side, name in (
        (ground.prefill, "aclose"),
        (ground.decode, "aclose"),
        (ground.decode, "shutdown"),
    ):
        with urls_of(ground.scheme, 1) as ((url,),):
            async for cancel in sweeper.sweep(f"{side.engine_id} {name}"):
                worker, caches = new_worker(ground, side, url)
                await worker.start()
                await _begin_transfer(ground, side, worker, caches)
                await cancel(getattr(worker, name))
                if not cancel.has_begun:
                    await worker.aclose()
                await expect_quiet(caches)
                await has_let_go(worker)
                expect(not worker.statistics().connected_peers, "it is connected")
                await worker.aclose()
                for buffer in ground.buffers().values():
                    await _take_what_nobody_took(buffer)


async def _begin_transfer(
    ground: P2PGround, side: Side, worker: P2PWorker, caches: ToyCaches
) -> None:
    """Begin to save, or to load what is there and what never comes."""
    name = ground.new_name()
    if side is ground.prefill:
        caches.compute()
        orders = P2PMetadata(saves=(ground.save_request(name),))
    else:
        if ground.direction == "pull":
            await ground.save(name)
        never = ground.load_request(ground.new_name())
        orders = P2PMetadata(loads=(ground.load_request(name), never))
    worker.bind_connector_metadata(orders)
    await worker.start_load_kv()
    if side is ground.prefill:
        worker.save_kv_layer(ground.model.layer_names[0])
        await until(lambda: worker.statistics().saving == 1)


async def _take_what_nobody_took(buffer: LookupBuffer) -> None:
    await until(lambda: not buffer.statistics().leased)
    for entry_id in list(buffer.ledger.table.entries):
        await buffer.withdraw(entry_id)

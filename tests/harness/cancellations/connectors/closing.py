"""A worker begins and ends: nothing is left open, and memory is quiet."""

from __future__ import annotations

import functools
from typing import Final

import msgspec

from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import P2PMetadata
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect
from harness.cancellations.connectors.caches import ToyCaches
from harness.cancellations.connectors.grounds import (
    P2PGround,
    Side,
    has_let_go,
    urls_of,
)
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.partners import Closing
from harness.cancellations.sweeper import Sweeper, ticks

__all__ = ("CLOSING", "a_workers_end", "a_workers_start", "new_worker")

_LATE: Final = 5


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
    shape = first.shape
    if shape is None:
        raise RuntimeError("the engines here have a shape")
    place = (ground.prefill, ground.decode).index(side)
    caches = ToyCaches(ground.model, shape, 0, place, side.gpu)
    worker.register_kv_caches(caches.layers)
    return worker, caches


async def a_workers_start(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, nothing is open, and it can be started."""
    worker: P2PWorker
    side = ground.prefill if ground.direction == "pull" else ground.decode

    with urls_of(ground.scheme, 1) as urls:

        async def before() -> None:
            nonlocal worker
            worker, _ = new_worker(ground, side, urls[0][0])
            await sweeper.pause()

        async def check(outcome: Outcome[None]) -> None:
            is_open = worker.routes.server is not None
            expect(outcome.cancelled or is_open == worker.routes.serves, "not open")
            await worker.start()
            await worker.aclose()
            await ground.check_quiet()

        await sweeper.sweep("a worker's start", lambda: worker.start(), check, before)


async def a_workers_end(ground: P2PGround, sweeper: Sweeper) -> None:
    """In the middle of a load or a save: memory is quiet, and everybody is told."""
    await _end_of(ground, sweeper, ground.prefill, "aclose")
    await _end_of(ground, sweeper, ground.decode, "aclose")
    await _end_of(ground, sweeper, ground.decode, "shutdown")


async def _end_of(ground: P2PGround, sweeper: Sweeper, side: Side, name: str) -> None:
    worker: P2PWorker
    caches: ToyCaches
    closing: Closing

    with urls_of(ground.scheme, 1) as urls:

        async def before() -> None:
            nonlocal worker, caches, closing
            closing = Closing()
            worker, caches = new_worker(ground, side, urls[0][0])
            await worker.start()
            await _begin_transfer(ground, side, worker, caches)
            await sweeper.pause()

        async def check(outcome: Outcome[None]) -> None:
            if not closing.has_begun:
                await worker.aclose()
            caches.spoil()
            await ticks(_LATE)
            caches.expect_spoilt()
            await has_let_go(worker)
            expect(not worker.statistics().connected_peers, "it is connected")
            await worker.aclose()
            await _clear(ground)
            await ground.check_quiet()

        await sweeper.sweep(
            f"a worker's {name}",
            lambda: closing.run(getattr(worker, name)),
            check,
            before,
        )


async def _begin_transfer(
    ground: P2PGround, side: Side, worker: P2PWorker, caches: ToyCaches
) -> None:
    """Begin to save, or to load what is there and what never comes."""
    name = ground.new_name()
    if side is ground.prefill:
        caches.compute()
        order = ground.save_request(name)
        worker.bind_connector_metadata(P2PMetadata(saves=(order,)))
        await worker.start_load_kv()
        worker.save_kv_layer(ground.model.layer_names[0])
        await until(lambda: worker.statistics().saving == 1)
    else:
        if ground.direction == "pull":
            await ground.save(name)
        orders = ground.load_request(name), ground.load_request(ground.new_name())
        worker.bind_connector_metadata(P2PMetadata(loads=orders))
        await worker.start_load_kv()


async def _clear(ground: P2PGround) -> None:
    """Take what nobody took."""
    for buffer in ground.buffers().values():
        await until(functools.partial(_is_free, buffer))
        for entry_id in list(buffer.ledger.table.entries):
            await buffer.withdraw(entry_id)


def _is_free(buffer: LookupBuffer) -> bool:
    return not buffer.statistics().leased


CLOSING: Final[tuple[ConnectorScenario[P2PGround], ...]] = (
    ConnectorScenario(a_workers_start, ("P2PWorker.start", "P2PRoutes.open")),
    ConnectorScenario(
        a_workers_end,
        (
            "P2PWorker.aclose",
            "KVConnectorWorker.shutdown",
            "P2PRoutes.aclose",
            "Transfers.aclose",
        ),
        is_costly=True,
    ),
)

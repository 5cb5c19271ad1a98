"""A peer that is gone fails what waits for it, at once, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator

import msgspec
import pytest

from asynckv.buffers.remote.peer import connect
from asynckv.connectors.options import Direction
from asynckv.connectors.requests import LoadOrder, P2PMetadata
from asynckv.testing.blocked import until
from harness.cancellations.connectors.grounds import (
    P2PGround,
    open_p2p,
    until_loaded,
    until_saved,
)


async def begin_load(ground: P2PGround) -> LoadOrder:
    order = ground.load_order(ground.new_name())
    await ground.begin_load(order)
    assert ground.decode.workers[0].statistics().loading == 1
    return order


async def expect_failed(ground: P2PGround, order: LoadOrder) -> None:
    for worker in ground.decode.workers:
        await until_loaded(worker)
        results = worker.get_finished()
        assert results.failed_recving == {order.request_id}
        assert results.invalid_block_ids == {*order.block_ids[0]}
        assert results.reasons[order.request_id].startswith(
            ("PeerLost", "EntryAborted", "BufferClosed")
        )


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_loads_of_a_rank_that_dies_fail_with_their_blocks(
    direction: Direction, sizes: tuple[int, int]
) -> None:
    async with open_p2p("tcp", direction, sizes) as ground:
        order = await begin_load(ground)
        ground.prefill.workers[-1].routes.abort()
        await expect_failed(ground, order)


def without_peer(ground: P2PGround) -> LoadOrder:
    return msgspec.structs.replace(ground.load_order(ground.new_name()), peer="")


async def test_a_load_that_names_no_peer_fails_with_the_last_that_may_send() -> None:
    async with open_p2p("tcp", "push") as ground:
        server = ground.decode.workers[0].routes.server
        assert server is not None
        async with connect(server.url, identity="Q/1"):  # sends another rank's part
            order = without_peer(ground)
            await ground.begin_load(order)
            ground.prefill.workers[0].routes.abort()
            await expect_failed(ground, order)


async def test_a_load_that_names_no_peer_waits_for_those_that_are_left() -> None:
    async with open_p2p("tcp", "push") as ground, another_prefill(ground) as left:
        await left.hand_over()
        ground.decode.caches[0].spoil()
        order = without_peer(ground)
        await ground.begin_load(order)
        links = ground.decode.workers[0].statistics().links
        ground.prefill.workers[0].routes.abort()
        await until(lambda: ground.decode.workers[0].statistics().links < links)
        await left.save(order.transfer_id)
        await ground.end_load(order)


@contextlib.asynccontextmanager
async def another_prefill(ground: P2PGround) -> AsyncIterator[P2PGround]:
    """Yield the same with Q for P, beside it."""
    side = ground.prefill
    engine = msgspec.structs.replace(side.workers[0].engine, engine_id="Q")
    async with side.new_worker(side.config, engine) as worker:
        worker.register_kv_caches(side.caches[0].layers)
        await worker.start()
        prefill = dataclasses.replace(side, workers=(worker,))
        yield dataclasses.replace(ground, prefill=prefill)


async def test_what_a_peer_had_sent_before_it_died_is_loaded() -> None:
    async with open_p2p("mem", "push") as ground:
        name = ground.new_name()
        await ground.save(name)
        ground.prefill.workers[0].routes.abort()
        await ground.load(name)


async def test_a_peer_that_is_sending_fails_what_it_has_begun() -> None:
    async with open_p2p("unix", "push") as ground:
        order = await begin_load(ground)
        worker = ground.prefill.workers[0]
        save = ground.save_order(order.transfer_id)
        worker.bind_connector_metadata(P2PMetadata(saves=(save,)))
        worker.save_kv_layer(ground.model.layer_names[0])
        (load,) = ground.decode.workers[0]._loading._loads
        await until(lambda: load.unseen_rank("P/0") is None)
        worker.routes.abort()
        await worker.wait_for_save()
        await until_saved(worker)
        assert worker.get_finished().failed_sending == {save.request_id}
        await expect_failed(ground, order)


async def test_another_peer_that_dies_fails_nothing() -> None:
    async with open_p2p("mem", "push") as ground:
        order = await begin_load(ground)
        ground.decode.workers[0]._loading._on_lost("P/1")
        ground.decode.workers[0]._loading._on_lost("Q/0")
        await ground.save(order.transfer_id)
        await ground.end_load(order)

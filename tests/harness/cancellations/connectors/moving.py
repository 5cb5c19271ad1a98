"""One prompt's KV on its way: blocks are quiet when it is cancelled, entries whole."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Final

from asynckv.connectors.caches import Staging
from asynckv.connectors.engine import EntryHeader
from asynckv.connectors.p2p.entries import (
    Target,
    release,
    report_failure,
    withdraw,
)
from asynckv.connectors.p2p.load import P2PLoad
from asynckv.connectors.p2p.save import HostCopies, P2PSave
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect
from asynckv.waits.waiting import wait_shielded
from harness.cancellations.connectors.grounds import P2PGround, expect_quiet
from harness.cancellations.sweeper import Sweeper, scenario

__all__: tuple[str, ...] = ()

_TIMEOUT_S: Final = 20.0
_HEADER: Final = EntryHeader(engine_id="P", rank=0, block_size=1, layers=())


@scenario(
    *("Scratch.write", "Scratch.leave", "P2PLoad.run", "Assembly.place"),
    *("BlockMoves.reached", "BlockMoves.fetch"),
)
async def a_load(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it writes to no block, and what it has not taken can be loaded."""
    worker, caches = ground.decode.workers[0], ground.decode.caches[0]

    async def run(load: P2PLoad) -> None:
        await load.run(*worker.routes.sources(load.request))
        caches.expect_computed()

    async def read(load: P2PLoad) -> None:
        """As ``run``, one source rank after the other, and not in tasks."""
        reads, sources = worker.routes.sources(load.request)
        load._expect(reads, sources)
        for rank, source in sources.items():
            await load._read(rank, source, reads[rank])
        caches.expect_computed()

    for call in (run, read):
        async for cancel in sweeper.sweep(call.__name__):
            name = ground.new_name()
            await ground.save(name)
            caches.spoil()
            order = ground.load_request(name)
            load = P2PLoad(worker.engine, worker._registered(), order, _TIMEOUT_S)
            await cancel(call, load)
            await expect_quiet(caches)
            _, sources = worker.routes.sources(load.request)
            left = tuple(sources.values())
            if cancel.has_begun:
                left = load.untaken_sources
            if len(left) == len(sources):
                await ground.load(name, [worker])
            else:
                for source in left:
                    await release(source, load.request, _TIMEOUT_S)
            await ground.load(name, ground.decode.workers[1:])


@scenario("P2PSave.run")
async def a_save(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it reads no block, and what it has not finished is no entry."""
    worker, caches = ground.prefill.workers[0], ground.prefill.caches[0]

    async def run(save: P2PSave) -> None:
        await save.run(worker.routes.targets(save.request))

    async def write(save: P2PSave) -> None:
        """As ``run``, for one reader after the other, and in as few tasks as can be."""
        async with _copying(save._host):
            for target in worker.routes.targets(save.request):
                await save._write(target)

    for call in (run, write):
        async for cancel in sweeper.sweep(call.__name__):
            caches.compute()
            save = worker._saving.new_save(ground.save_request(ground.new_name()))
            save.offer_rest(worker._registered().now())
            outcome = await cancel(call, save)
            save.end()
            expect(not worker._staging.used_bytes, "room in host memory is still taken")
            caches.spoil()
            for target in worker.routes.targets(save.request):
                is_whole = await _take_out(target)
                expect(is_whole or outcome.cancelled, "it was saved, and is not there")
            await ground.check_quiet()
            await ground.hand_over()


async def _take_out(target: Target) -> bool:
    find, entry_id, _ = target
    return await (await find()).withdraw(entry_id)


@contextlib.asynccontextmanager
async def _copying(copies: HostCopies) -> AsyncIterator[None]:
    """Let them be made meanwhile, and end that."""
    task = asyncio.create_task(copies.run())
    try:
        yield
    finally:
        task.cancel()
        await wait_shielded(task)


@scenario("HostCopies.copy_of", "HostCopies.run", "Staging.copy")
async def a_host_copy(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it reads no block, and takes no room."""
    worker, caches = ground.prefill.workers[0], ground.prefill.caches[0]
    moves, (first, *rest) = worker._registered(), ground.model.layer_names
    block_ids = ground.save_request("").block_ids
    blocks_of = functools.partial(moves.caches.blocks, block_ids=block_ids)
    staging = Staging(sum(one.nbytes for one in blocks_of(first).values()))

    async def run(copies: HostCopies) -> None:
        copies.ask(rest, moves.now())
        with contextlib.suppress(TimeoutError):  # for these there is no room
            await copies.run()
        expect(copies.is_there(first), "it is not there")

    async def wait(copies: HostCopies) -> None:
        async with _copying(copies):
            await copies.copy_of(first)

    for call in (run, wait):
        async for cancel in sweeper.sweep(call.__name__, is_open=True):
            caches.compute()
            copies = HostCopies(moves, staging, blocks_of, lambda layer: None)
            copies.may_wait_for_room = False
            copies.ask((first,), moves.now())
            await cancel(call, copies)
            await expect_quiet(caches)
            copies.drop()
            expect(not staging.used_bytes, "room in host memory is still taken")


@scenario("release")
async def a_release(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it has let an entry go or not, and holds nothing."""
    worker = ground.decode.workers[0]
    several = len(ground.decode.workers) > 1 and ground.direction == "pull"
    async for cancel in sweeper.sweep():
        name = ground.new_name()
        await ground.save(name)
        order = ground.load_request(name)
        sources = list(worker.routes.sources(order)[1].values())
        outcome = await cancel(release, sources[0], order, _TIMEOUT_S)
        for number, (find, entry_id) in enumerate(sources):
            is_there = await (await find()).withdraw(entry_id)
            was_let_go = not number and not outcome.cancelled and not several
            expect(not (is_there and was_let_go), "it was not let go")
        if ground.direction == "push":  # what was pushed to other ranks lies there
            for buffer in ground.buffers().values():
                while buffer.statistics().entries:
                    await buffer.drop_select()


@scenario("report_failure", "withdraw")
async def a_failure(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it has said so or not; and it was taken back, or is still there."""
    worker = ground.prefill.workers[0]

    async def report(target: Target) -> None:
        await report_failure(target, [1, 2, 3], _HEADER, "no room", _TIMEOUT_S)

    for takes_back in (False, True):
        async for cancel in sweeper.sweep("that is taken back" * takes_back):
            request = ground.save_request(ground.new_name())
            target = worker.routes.targets(request)[0]
            if takes_back:
                await report(target)
            outcome = await (
                cancel(withdraw, target, _TIMEOUT_S)
                if takes_back
                else cancel(report, target)
            )
            is_there = await _take_out(target)
            expect(outcome.cancelled or is_there != takes_back, f"is there: {is_there}")


@scenario("P2PNotifications.take_back_report")
async def a_report_taken_back(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, what was said of a failure is there or not; else it is gone."""
    worker = ground.prefill.workers[0]
    notifications = worker._saving._notifications
    async for cancel in sweeper.sweep():
        request = ground.save_request(ground.new_name())
        notifications.report_failure(request, _HEADER, "no room")
        await until(lambda: not worker.statistics().releasing)
        outcome = await cancel(notifications.take_back_report, request)
        for target in worker.routes.targets(request):
            is_there = await _take_out(target)
            expect(outcome.cancelled or not is_there, "it is still there")
        expect(notifications.has_reported(request), "it is forgotten")
        notifications.forget_report(request)

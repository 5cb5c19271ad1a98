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
    Source,
    Target,
    release,
    report_failure,
    withdraw,
)
from asynckv.connectors.p2p.load import P2PLoad
from asynckv.connectors.p2p.save import HostCopies, P2PSave
from asynckv.connectors.requests import LoadRequest, SaveRequest
from asynckv.shielding import wait_shielded
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect
from harness.cancellations.connectors.grounds import P2PGround
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.sweeper import Sweeper, ticks

__all__ = (
    "MOVING",
    "a_failure",
    "a_host_copy",
    "a_load",
    "a_release",
    "a_report_taken_back",
    "a_save",
    "a_withdrawal",
)

_TIMEOUT_S: Final = 20.0
_LATE: Final = 5


async def a_load(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it writes to no block, and what it has not taken can be loaded."""
    worker, caches = ground.decode.workers[0], ground.decode.caches[0]
    load: P2PLoad
    name, has_begun = "", False

    async def before() -> None:
        nonlocal name, load, has_begun
        name, has_begun = ground.new_name(), False
        await ground.save(name)
        caches.spoil()
        order = ground.load_request(name)
        load = P2PLoad(worker.engine, worker._registered(), order, _TIMEOUT_S)
        await sweeper.pause()

    async def run() -> None:
        nonlocal has_begun
        has_begun = True
        await load.run(*worker.routes.sources(load.request))
        caches.expect_computed()

    async def read() -> None:
        """As ``run``, one source rank after the other, and not in tasks."""
        nonlocal has_begun
        has_begun = True
        reads, sources = worker.routes.sources(load.request)
        load._expect(reads, sources)
        for rank, source in sources.items():
            await load._read(rank, source, reads[rank])
        caches.expect_computed()

    async def check(outcome: Outcome[None]) -> None:
        caches.spoil()
        await ticks(_LATE)
        caches.expect_spoilt()
        _, sources = worker.routes.sources(load.request)
        left = load.untaken_sources if has_begun else tuple(sources.values())
        if len(left) == len(sources):
            await ground.load(name, [worker])
        else:
            for source in left:
                await release(source, load.request, _TIMEOUT_S)
        await ground.load(name, ground.decode.workers[1:])
        await ground.check_quiet()

    await sweeper.sweep("a load", run, check, before)
    await sweeper.sweep("what a load reads", read, check, before)


async def a_save(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it reads no block, and what it has not finished is no entry."""
    worker, caches = ground.prefill.workers[0], ground.prefill.caches[0]
    save: P2PSave

    async def before() -> None:
        nonlocal save
        caches.compute()
        save = worker._saving.new_save(ground.save_request(ground.new_name()))
        save.offer_rest(worker._registered().now())
        await sweeper.pause()

    async def run() -> None:
        await save.run(worker.routes.targets(save.request))

    async def write() -> None:
        """As ``run``, for one reader after the other, and in as few tasks as can be."""
        async with _copying(save._host):
            for target in worker.routes.targets(save.request):
                await save._write(target)

    async def check(outcome: Outcome[None]) -> None:
        save.end()
        expect(not worker._staging.used_bytes, "room in host memory is still taken")
        caches.spoil()
        for find, entry_id, _ in worker.routes.targets(save.request):
            buffer = await find()
            is_whole = await buffer.withdraw(entry_id)
            expect(is_whole or outcome.cancelled, "it was saved, and is not there")
        await ground.check_quiet()
        await ground.hand_over()

    await sweeper.sweep("a save", run, check, before)
    await sweeper.sweep("what a save writes", write, check, before)


@contextlib.asynccontextmanager
async def _copying(copies: HostCopies) -> AsyncIterator[None]:
    """Let them be made meanwhile, and end that."""
    task = asyncio.create_task(copies.run())
    try:
        yield
    finally:
        task.cancel()
        await wait_shielded(task)


async def a_host_copy(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it reads no block, and takes no room."""
    worker, caches = ground.prefill.workers[0], ground.prefill.caches[0]
    moves, (first, *rest) = worker._registered(), ground.model.layer_names
    block_ids = ground.save_request("").block_ids
    blocks_of = functools.partial(moves.caches.blocks, block_ids=block_ids)
    staging = Staging(sum(one.nbytes for one in blocks_of(first).values()))
    copies: HostCopies

    async def before() -> None:
        nonlocal copies
        caches.compute()
        copies = HostCopies(moves, staging, blocks_of, lambda layer: None)
        copies.may_wait_for_room = False
        copies.ask((first,), moves.now())
        await sweeper.pause()

    async def run() -> None:
        copies.ask(rest, moves.now())
        with contextlib.suppress(TimeoutError):  # for these there is no room
            await copies.run()
        expect(copies.is_there(first), "it is not there")

    async def wait() -> None:
        async with _copying(copies):
            await copies.copy_of(first)

    async def check(outcome: Outcome[None]) -> None:
        caches.spoil()
        await ticks(_LATE)
        copies.drop()
        expect(not staging.used_bytes, "room in host memory is still taken")

    await sweeper.sweep("copies in host memory", run, check, before)
    await sweeper.sweep("a wait for a copy", wait, check, before)


async def a_release(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it has let an entry go or not, and holds nothing."""
    worker = ground.decode.workers[0]
    sources: list[Source] = []
    order: LoadRequest

    async def before() -> None:
        nonlocal order
        name = ground.new_name()
        await ground.save(name)
        order = ground.load_request(name)
        sources[:] = worker.routes.sources(order)[1].values()
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        for number, (find, entry_id) in enumerate(sources):
            buffer = await find()
            is_there = await buffer.withdraw(entry_id)
            several = len(ground.decode.workers) > 1 and ground.direction == "pull"
            was_let_go = not number and not outcome.cancelled and not several
            expect(not (is_there and was_let_go), "it was not let go")
        if ground.direction == "push":
            await _clear_others(ground)
        await ground.check_quiet()

    await sweeper.sweep(
        "a release", lambda: release(sources[0], order, _TIMEOUT_S), check, before
    )


async def a_failure(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it has said so or not."""
    worker = ground.prefill.workers[0]
    header = EntryHeader(engine_id="P", rank=0, block_size=1, layers=())
    tokens = [1, 2, 3]
    targets: list[Target] = []

    async def before() -> None:
        targets[:] = worker.routes.targets(ground.save_request(ground.new_name()))
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        find, entry_id, _ = targets[0]
        is_there = await (await find()).withdraw(entry_id)
        expect(is_there or outcome.cancelled, "it was said, and is not there")
        await ground.check_quiet()

    await sweeper.sweep(
        "a failure",
        lambda: report_failure(targets[0], tokens, header, "no room", _TIMEOUT_S),
        check,
        before,
    )


async def a_withdrawal(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, the entry is there or not; else it is gone."""
    worker = ground.prefill.workers[0]
    header = EntryHeader(engine_id="P", rank=0, block_size=1, layers=())
    targets: list[Target] = []

    async def before() -> None:
        targets[:] = worker.routes.targets(ground.save_request(ground.new_name()))
        await report_failure(targets[0], [1, 2, 3], header, "no room", _TIMEOUT_S)
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        find, entry_id, _ = targets[0]
        is_there = await (await find()).withdraw(entry_id)
        expect(outcome.cancelled or not is_there, "it is still there")
        await ground.check_quiet()

    await sweeper.sweep(
        "a withdrawal", lambda: withdraw(targets[0], _TIMEOUT_S), check, before
    )


async def a_report_taken_back(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, what was said of a failure is there or not; else it is gone."""
    worker = ground.prefill.workers[0]
    notifications = worker._saving._notifications
    header = EntryHeader(engine_id="P", rank=0, block_size=1, layers=())
    request: SaveRequest

    async def before() -> None:
        nonlocal request
        request = ground.save_request(ground.new_name())
        notifications.report_failure(request, header, "no room")
        await until(lambda: not worker.statistics().releasing)
        await sweeper.pause()

    async def check(outcome: Outcome[bool]) -> None:
        for find, entry_id, _ in worker.routes.targets(request):
            is_there = await (await find()).withdraw(entry_id)
            expect(outcome.cancelled or not is_there, "it is still there")
        expect(notifications.has_reported(request), "it is forgotten")
        notifications.forget_report(request)
        await ground.check_quiet()

    await sweeper.sweep(
        "a report that is taken back",
        lambda: notifications.take_back_report(request),
        check,
        before,
    )


async def _clear_others(ground: P2PGround) -> None:
    """What was pushed to other ranks lies in their buffers."""
    for buffer in ground.buffers().values():
        while buffer.statistics().entries:
            await buffer.drop_select()


MOVING: Final[tuple[ConnectorScenario[P2PGround], ...]] = (
    ConnectorScenario(
        a_load,
        (
            "Scratch.write",
            "Scratch.leave",
            "P2PLoad.run",
            "Assembly.place",
            "BlockMoves.reached",
            "BlockMoves.fetch",
        ),
    ),
    ConnectorScenario(
        a_save,
        ("P2PSave.run",),
    ),
    ConnectorScenario(
        a_host_copy, ("HostCopies.copy_of", "HostCopies.run", "Staging.copy")
    ),
    ConnectorScenario(a_release, ("release",)),
    ConnectorScenario(a_failure, ("report_failure",)),
    ConnectorScenario(a_withdrawal, ("withdraw",)),
    ConnectorScenario(a_report_taken_back, ("P2PNotifications.take_back_report",)),
)

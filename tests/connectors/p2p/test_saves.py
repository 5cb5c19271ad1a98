"""No step waits for room at a peer, or for the way there; and no byte is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest
import torch

from asynckv.abc import InsertWriter
from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.caches import BlockMoves, PagedCaches, Staging
from asynckv.connectors.engine import EntryHeader
from asynckv.connectors.options import Direction
from asynckv.connectors.p2p.save import P2PSave
from asynckv.connectors.p2p.saves import BlockRelease, P2PSaving
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import SaveRequest
from asynckv.connectors.transfers import Transfers
from asynckv.devices.copying import CopyPool
from asynckv.errors import GPUFailed
from asynckv.tensors.blocks import KVMemory
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.faults.fault import Kind
from asynckv.testing.faults.injectors import BlackHole, Stall
from asynckv.testing.faults.proxy import Proxy
from asynckv.types import TensorSpec
from asynckv.waits.waiting import wait_shielded
from harness.cancellations.connectors.grounds import (
    LARGE,
    SMALL,
    P2PGround,
    Scheme,
    open_p2p,
    until_saved,
)
from harness.engines.toy_model import ToyModel
from harness.engines.toy_parts import ToyParts, open_toy_parts

ORDER = SaveRequest("r", "t", "D", (1, 2, 3), ((1,),))


@pytest.fixture
async def parts() -> AsyncIterator[ToyParts]:
    async with open_toy_parts("P") as parts:
        yield parts
        parts.routes.abort()


@pytest.fixture
def saving(parts: ToyParts) -> P2PSaving:
    return P2PSaving(*parts.all, moves=parts.moves, staging=Staging(2**20))


@pytest.fixture
async def hurried(saving: P2PSaving, parts: ToyParts) -> P2PSaving:
    """It serves, has no room for a save, and gives it up soon."""
    saving.options = msgspec.structs.replace(parts.options, save_timeout_s=0.1)
    await fill_parts(parts)
    return saving


async def test_where_nothing_is_saved_the_stream_is_not_asked(
    saving: P2PSaving, parts: ToyParts
) -> None:
    saving.offer("a")
    await saving.begin_to_wait()
    assert not parts.asked


async def test_a_request_is_saved_once_at_a_time(
    saving: P2PSaving, parts: ToyParts
) -> None:
    saving.begin(ORDER)
    saving.begin(ORDER)
    assert parts.transfers.count("send") == 1
    assert parts.transfers.others == 1  # whoever waits for the second is told


async def test_saves_fail_where_a_stream_is_not_known(
    saving: P2PSaving, parts: ToyParts
) -> None:
    saving.begin(ORDER)
    parts.moves().follow(GPUFailed("it is stuck"))
    with pytest.raises(GPUFailed, match="stuck"):
        await saving.begin_to_wait()
    results = parts.transfers.results()
    assert results.failed_sending == {"r"} and not results.full_sending


async def fill_parts(parts: ToyParts) -> None:
    """Serve, and leave no room for a save."""
    await parts.routes.open()
    assert parts.routes.buffer is not None
    await fill_buffer(parts.routes.buffer)


async def fill_buffer(buffer: LookupBuffer) -> str:
    room = buffer.statistics().max_bytes - 8  # its token takes some
    full = torch.zeros(room, dtype=torch.uint8)
    return await buffer.insert([0], None, full, None, None)


async def test_blocks_that_are_held_are_left_when_the_engine_wants_them(
    parts: ToyParts,
) -> None:
    engine = msgspec.structs.replace(parts.engine, holds_saved_blocks=True)
    staging = Staging(2**20)
    saving = P2PSaving(*(engine, *parts.all[1:]), moves=parts.moves, staging=staging)
    await fill_parts(parts)
    saving.begin(ORDER)
    waiting = asyncio.create_task(saving.begin_to_wait())
    for wanted in ({"another"}, set[str]()):
        await until_blocked(waiting)
        saving.let_go_of_blocks(wanted)
    await until_blocked(waiting)
    assert not waiting.done() and staging.used_bytes == 0
    saving.let_go_of_blocks({"r"})
    await asyncio.wait_for(waiting, 10)
    assert staging.copies == 1


async def until_left(saving: P2PSaving, parts: ToyParts) -> None:
    """Let the step go on, and the save end."""
    await saving.begin_to_wait()
    await until(lambda: not parts.transfers.count("send"))


async def test_a_save_that_nobody_wants_leaves_when_it_ends(
    saving: P2PSaving, parts: ToyParts
) -> None:
    await parts.routes.open()
    assert parts.routes.buffer is not None
    saving.begin(ORDER)
    saving.withdraw(ORDER)
    await until_left(saving, parts)
    await parts.transfers.wait_others()
    assert parts.routes.buffer.statistics().withdrawn == 1


async def test_of_a_failed_save_that_nobody_wants_nobody_is_told(
    hurried: P2PSaving, parts: ToyParts
) -> None:
    hurried.begin(ORDER)
    hurried.withdraw(ORDER)
    await until_left(hurried, parts)
    await parts.transfers.wait_others()  # a notice would wait for room


async def test_a_save_without_room_is_given_up_in_its_time(
    hurried: P2PSaving, parts: ToyParts
) -> None:
    hurried.begin(ORDER)
    await until_left(hurried, parts)
    results = parts.transfers.results()
    assert results.failed_sending == results.full_sending == {"r"}


SHORT_S = 2.0
"""Ten times what a step may wait: other things run on this machine too."""

HUGE = ToyModel(layers=1, head_dim=2048)
"""Its layer is more than a unix socket and a proxy take in."""

DIRECTIONS = pytest.mark.parametrize("direction", ["pull", "push"])


async def fill(ground: P2PGround) -> tuple[LookupBuffer, str]:
    (buffer,) = ground.buffers().values()
    return buffer, await fill_buffer(buffer)


async def step(ground: P2PGround, name: str) -> P2PWorker:
    """Save, and overwrite the blocks when that is allowed."""
    (worker,) = ground.prefill.workers
    ground.begin_save(name)
    async with asyncio.timeout(SHORT_S):
        await worker.wait_for_save()
    ground.prefill.caches[0].spoil()
    return worker


async def check_loads(ground: P2PGround, name: str) -> None:
    """Look at every byte of what was saved, where it is loaded."""
    ground.prefill.clear()
    await ground.load(name)


@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["small", "large"])
@DIRECTIONS
async def test_a_save_without_room_goes_on_from_a_copy(
    direction: Direction, model: ToyModel
) -> None:
    async with open_p2p("tcp", direction, model=model) as ground:
        buffer, filler = await fill(ground)
        worker = await step(ground, name := ground.new_name())
        statistics = worker.statistics()
        assert statistics.saving == 1 and statistics.staged_saves
        assert statistics.staged_bytes == ground.prefill.caches[0].prompt_nbytes
        await buffer.withdraw(filler)
        await until_saved(worker)
        assert worker.get_finished().failed_sending == frozenset()
        assert worker.statistics().staged_bytes == 0
        await check_loads(ground, name)


def held(ground: P2PGround, name: str) -> tuple[P2PWorker, asyncio.Task[None]]:
    """Begin to save for an engine that leaves the blocks alone meanwhile."""
    (worker,) = ground.prefill.workers
    saving = worker._saving
    saving.engine = msgspec.structs.replace(saving.engine, holds_saved_blocks=True)
    ground.begin_save(name)
    return worker, asyncio.create_task(worker.wait_for_save())


@DIRECTIONS
async def test_a_save_from_blocks_that_are_held_waits_for_room_without_a_copy(
    direction: Direction,
) -> None:
    async with open_p2p("mem", direction) as ground:
        buffer, filler = await fill(ground)
        worker, saving = held(ground, name := ground.new_name())
        worker._staging.max_bytes = 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):  # longer than a step may wait
                await asyncio.shield(saving)
        await buffer.withdraw(filler)
        await saving
        await until_saved(worker)
        assert worker.statistics().staged_saves == worker.statistics().late_saves == 0
        await check_loads(ground, name)


@DIRECTIONS
async def test_blocks_that_are_held_no_longer_are_let_go_of(
    direction: Direction,
) -> None:
    async with open_p2p("mem", direction) as ground:
        buffer, filler = await fill(ground)
        worker, saving = held(ground, name := ground.new_name())
        await until_blocked(saving)
        worker.let_go_of_blocks({"p another"})
        await until_blocked(saving)
        worker.let_go_of_blocks({f"p {name}"})
        async with asyncio.timeout(SHORT_S):
            await saving
        ground.prefill.caches[0].spoil()
        await buffer.withdraw(filler)
        await until_saved(worker)
        assert worker.statistics().staged_saves == 1
        await check_loads(ground, name)


@DIRECTIONS
async def test_without_room_for_a_copy_a_save_fails_and_who_loads_is_told(
    direction: Direction,
) -> None:
    async with open_p2p("mem", direction) as ground:
        await fill(ground)
        ground.prefill.workers[0]._staging.max_bytes = 0
        worker = await step(ground, name := ground.new_name())
        results, failed = worker.get_finished(), {f"p {name}"}
        assert results.failed_sending == failed
        # Where it is pushed to it is not known why it waits.
        assert results.full_sending == (failed if direction == "pull" else set())
        assert (worker.statistics().saving, worker.statistics().late_saves) == (0, 1)
        order = ground.load_request(name)
        with pytest.raises(AssertionError, match="has not saved it: its blocks"):
            await ground.begin_load(order)
            await ground.end_load(order)


async def test_a_copy_that_cannot_be_made_lets_no_block_be_read_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(spec: TensorSpec) -> torch.Tensor:
        raise RuntimeError(f"no memory for {spec}")

    monkeypatch.setattr("asynckv.connectors.caches.empty_tensor", fail)
    async with open_p2p("mem", "pull") as ground:
        buffer, filler = await fill(ground)
        worker, saving = held(ground, name := ground.new_name())
        await until_blocked(saving)
        worker.let_go_of_blocks({f"p {name}"})
        await saving
        assert not worker.statistics().saving
        await buffer.withdraw(filler)
        assert worker.get_finished().failed_sending == {f"p {name}"}


async def test_no_step_waits_for_a_peer_that_does_not_answer_its_dialler() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with open_p2p("mem", "push") as ground:
            url = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
            (worker,) = ground.prefill.workers
            worker.routes.peers._lines.clear()
            worker.routes.peers._options.peers["D"] = (url,)
            await step(ground, ground.new_name())
            assert worker.statistics().staged_bytes


@contextlib.asynccontextmanager
async def through_a_proxy(
    scheme: Scheme = "tcp",
    *,
    heartbeat_ms: int | None = 200,
    model: ToyModel = LARGE,
) -> AsyncIterator[tuple[P2PGround, Proxy]]:
    async with open_p2p(scheme, "push", model=model) as ground:
        (worker,) = ground.prefill.workers
        peers, url = worker.routes.peers, worker.routes.peers._options.peers["D"][0]
        async with Proxy(url, heartbeat_ms=heartbeat_ms) as proxy:
            await peers.line("D", 0).aclose()
            peers._lines.clear()
            peers._options.peers["D"] = (proxy.url,)
            await ground.hand_over()
            yield ground, proxy


async def test_a_peer_that_is_lost_midway_keeps_no_step_waiting() -> None:
    async with through_a_proxy() as (ground, proxy):
        before = ground.prefill.workers[0].statistics().staged_saves
        with proxy.add(BlackHole()):
            worker = await step(ground, name := ground.new_name())
            assert worker.statistics().staged_saves == before + 1
            await until_saved(worker)  # the heartbeats end it
        assert worker.get_finished().failed_sending == {f"p {name}"}


@pytest.mark.parametrize("kind", ["both", "lanes"])
async def test_a_save_from_held_blocks_to_a_frozen_peer_is_given_up_in_its_time(
    kind: Kind,
) -> None:
    proxied = through_a_proxy("unix", heartbeat_ms=None, model=HUGE)
    async with proxied as (ground, proxy):
        (worker,) = ground.prefill.workers
        options = msgspec.structs.replace(worker.options, save_timeout_s=0.1)
        worker._saving.options = options
        with proxy.add(Stall(kind=kind)):
            _, saving = held(ground, name := ground.new_name())
            async with asyncio.timeout(10):  # its link would be lost after 30 s
                await saving
            await until_saved(worker)
            assert worker.get_finished().failed_sending == {f"p {name}"}
        await until(lambda: not worker.statistics().releasing)  # the reason is told


class StubbornWriter(InsertWriter):
    """Reads what it was given until it is hung up on."""

    def __init__(self, hung_up: asyncio.Event) -> None:
        self.hung_up = hung_up
        self.entry_id = "t"

    async def put(self, name: str, tensor: KVMemory) -> None:
        if name.endswith(".key"):
            await wait_shielded(asyncio.ensure_future(self.hung_up.wait()))
            raise ConnectionError("hung up")


class StubbornBuffer(LookupBuffer):
    hung_up: asyncio.Event

    @contextlib.asynccontextmanager
    async def open_insert(
        self, *args: Any, specs: Mapping[str, TensorSpec] | None = None, **kwargs: Any
    ) -> AsyncIterator[InsertWriter]:
        yield StubbornWriter(self.hung_up)


@pytest.mark.parametrize("room", [0, 2**20])
async def test_who_does_not_let_go_of_blocks_is_hung_up_on(room: int) -> None:
    caches = PagedCaches({"a": torch.arange(8.0).view(4, 2)}, None)
    order = SaveRequest("r", "t", "", (1, 2, 3), ((2, 0),))
    header = EntryHeader(engine_id="P", rank=0, block_size=2, layers=("a",))
    moves = BlockMoves(caches, CopyPool())
    save, transfers = P2PSave(moves, order, header, 60, Staging(room)), Transfers()
    async with StubbornBuffer("1MiB") as buffer:
        buffer.hung_up = asyncio.Event()

        async def find() -> LookupBuffer:
            return buffer

        run = lambda: save.run([(find, "t", 1)])  # noqa: E731 - as the worker has it
        state = transfers.begin("r", "send", run, ended=save.end)
        assert state is not None
        save.offer_rest()
        leaving = BlockRelease(transfers, lambda order: buffer.hung_up.set())
        async with asyncio.timeout(SHORT_S):
            await leaving.release({state: save})
        assert (save.released.is_set(), leaving.late) == (True, 1)
        await until(lambda: not transfers.count("send"))
        assert transfers.results().failed_sending == {"r"}


class SlowMoves(BlockMoves):
    """Copies that take longer than a step, by the clock."""

    async def gather(self, *arguments: Any) -> None:
        await asyncio.sleep(0.3)
        await super().gather(*arguments)


class LentWriter(InsertWriter):
    """Takes all at once; or reads until it is hung up on, if there is ``hung_up``."""

    entry_id = "t"

    def __init__(self, hung_up: asyncio.Event | None) -> None:
        self._hung_up = hung_up

    async def put(self, name: str, tensor: KVMemory) -> None:
        if self._hung_up is not None and not isinstance(tensor, torch.Tensor):
            await wait_shielded(asyncio.ensure_future(self._hung_up.wait()))
            raise ConnectionError("hung up")


class LendingBuffer(LookupBuffer):
    """A peer's, as far as a save can see. It answers late."""

    hung_up: asyncio.Event | None = None
    answer: asyncio.Event

    @contextlib.asynccontextmanager
    async def open_insert(
        self, *arguments: Any, **options: Any
    ) -> AsyncIterator[InsertWriter]:
        yield LentWriter(self.hung_up)
        await self.answer.wait()


Lending = tuple[Transfers, BlockRelease, Mapping[Any, P2PSave], LendingBuffer]


@contextlib.asynccontextmanager
async def lending(hung_up: asyncio.Event | None) -> AsyncIterator[Lending]:
    """Lend a save's blocks to a peer, while copies of them take longer than a step."""
    caches = PagedCaches({name: torch.ones(4, 2) for name in "ab"}, None)
    header = EntryHeader(engine_id="P", rank=0, block_size=2, layers=("a", "b"))
    moves, transfers = SlowMoves(caches, CopyPool()), Transfers()
    request = SaveRequest("r", "t", "", (1, 2, 3), ((2, 0),))
    save = P2PSave(moves, request, header, 60, Staging(2**20))

    def hang_up(order: SaveRequest) -> None:
        if hung_up is not None:
            hung_up.set()

    async with LendingBuffer("1MiB") as buffer:
        buffer.hung_up, buffer.answer = hung_up, asyncio.Event()

        async def find() -> LookupBuffer:
            await asyncio.sleep(0.1)  # dialling takes so long, by the clock
            return buffer

        async def run() -> None:
            await save.run([(find, "t", 1)])

        state = transfers.begin("r", "send", run, ended=save.end)
        save.offer_rest()
        yield transfers, BlockRelease(transfers, hang_up), {state: save}, buffer
        buffer.answer.set()
        await until(lambda: not transfers.count("send"))


async def test_who_reads_blocks_is_hung_up_on_though_their_copy_took_long() -> None:
    hung_up = asyncio.Event()
    async with lending(hung_up) as (transfers, release, saves, buffer):
        buffer.answer.set()
        async with asyncio.timeout(5):
            await release.release(saves)
        assert release.late == 1
        await until(lambda: not transfers.count("send"))
        assert transfers.results().reasons


async def test_what_is_put_whole_is_not_late_for_a_copy_that_nobody_needs() -> None:
    async with lending(None) as (transfers, release, saves, buffer):
        async with asyncio.timeout(5):
            await release.release(saves)
        assert release.late == 0
        buffer.answer.set()
        await until(lambda: not transfers.count("send"))
        assert not transfers.results().reasons

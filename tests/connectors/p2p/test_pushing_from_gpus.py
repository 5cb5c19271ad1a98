"""What is pushed leaves the GPU where it was computed, and comes to the peer's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.insert import RemoteWriter
from asynckv.buffers.remote.peer import Peer
from asynckv.connectors.caches import BlockMoves
from asynckv.connectors.p2p import saves
from asynckv.connectors.p2p.save import P2PSave
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.errors import GPUFailed
from asynckv.links.link import Link
from asynckv.sharing import exporter
from asynckv.tensors.paged_arena import PagedArena
from asynckv.testing.blocked import until, until_blocked
from asynckv.transfers.routes import GpuRoutes
from asynckv.types import TensorSpec
from harness.cancellations.connectors.grounds import (
    LARGE,
    P2PGround,
    open_p2p,
    until_saved,
)
from harness.engines.toy_model import ToyModel
from harness.fake_gpus.gates import Gate
from harness.gpu_pairs import SharedPuts

CHAOS = pytest.mark.chaos
ONE = ToyModel(layers=1, head_dim=96)
DEEP = ToyModel(layers=5, head_dim=768)
ENDS_S = 20
"""Far more than the fake takes, piece by piece, on a busy machine."""

DEEP_NBYTES = 2 * 3 * 16 * 4 * 768 * 4
LARGE_NBYTES = 2 * 3 * 16 * 4 * 96 * 4
"""Keys and values of three blocks, in a layer."""

APART = pytest.mark.parametrize(
    "are_apart",
    [pytest.param(False, id="one"), pytest.param(True, id="two", marks=CHAOS)],
)
PATIENT = pytest.mark.usefixtures("patient_steps")


@pytest.fixture
def patient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step give up the way by the GPU because the machine is slow."""
    monkeypatch.setattr(saves, "_FROM_BLOCKS_S", ENDS_S)
    monkeypatch.setattr(saves, "_STEP_S", 2 * ENDS_S)


@contextlib.asynccontextmanager
async def pushing(
    are_apart: bool = False, model: ToyModel = LARGE, **options: Any
) -> AsyncIterator[P2PGround]:
    """Yield engines whose link was dialled: the first save does not wait for that."""
    places: Any = {"on_gpus": True, "are_buffers_there": True, "are_apart": are_apart}
    opening: Any = open_p2p("unix", "push", model=model, **places, **options)
    async with opening as ground:
        yield ground


def worker_of(ground: P2PGround) -> P2PWorker:
    (worker,) = ground.prefill.workers
    return worker


def peer_of(ground: P2PGround) -> Peer:
    (line,) = worker_of(ground).routes.peers._lines.values()
    assert line._peer is not None
    return line._peer


def has_gone_by_gpu(peer: Peer) -> bool:
    if peer.transport == "cuda_ipc":
        return SharedPuts(peer).has_shown
    way = peer.routes.nccl(peer._linked())
    return way is not None and way.transport.sender._sending._next > 0


def taken_on_gpu(ground: P2PGround) -> int:
    return SharedPuts(peer_of(ground)).staged_bytes


def staged_in_host(ground: P2PGround) -> int:
    return worker_of(ground).statistics().staged_saves


def hold_blocks(ground: P2PGround) -> P2PWorker:
    """Let the engine leave the blocks of saves alone, as vLLM does."""
    worker = worker_of(ground)
    engine = msgspec.structs.replace(worker.engine, holds_saved_blocks=True)
    worker._saving.engine = engine
    return worker


@PATIENT
@APART
async def test_no_layer_comes_to_the_host_on_its_way(are_apart: bool) -> None:
    async with pushing(are_apart) as ground:
        before = staged_in_host(ground)
        await ground.hand_over()
        assert staged_in_host(ground) == before
        peer = peer_of(ground)
        assert peer.transport == ("nccl" if are_apart else "cuda_ipc")
        assert has_gone_by_gpu(peer)
        await until(lambda: not taken_on_gpu(ground))


@APART
async def test_layers_follow_each_other_through_little_memory(are_apart: bool) -> None:
    size = 2 * 2**20
    async with pushing(are_apart, DEEP, push_buffer_size=size) as ground:
        before, taken, arena = staged_in_host(ground), [0], peer_of(ground).on_gpu
        assert arena is not None and isinstance(arena.arena, PagedArena)
        gather = BlockMoves.gather_there

        async def looking(moves: BlockMoves, *args: Any) -> None:
            taken.append(taken_on_gpu(ground))
            await gather(moves, *args)

        hold_blocks(ground)  # so that no step says when it is enough
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockMoves, "gather_there", looking)
            await ground.hand_over()
        assert DEEP_NBYTES <= max(taken) <= arena.arena.pages.nbytes <= size
        assert (staged_in_host(ground), len(taken)) == (before, 1 + DEEP.layers)
        await until(lambda: not taken_on_gpu(ground))


@CHAOS
async def test_a_layer_that_never_fits_comes_by_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    huge = ToyModel(layers=1, head_dim=2048)
    async with pushing(model=huge, push_buffer_size=2**21) as ground:
        before = staged_in_host(ground)
        for _ in range(2):
            await ground.hand_over()
        assert staged_in_host(ground) == before + 2
        assert caplog.text.count("leave through host memory") == 1


async def test_a_gpu_without_memory_pushes_by_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pushing() as ground:
        assert ground.prefill.gpu is not None
        cuda, line = ground.prefill.gpu.process.cuda, next(iter(lines_of(ground)))

        def refuse(nbytes: int) -> None:
            raise GPUFailed("out of memory", code=2)

        peer_of(ground).abort()
        monkeypatch.setattr(cuda, "malloc", refuse)
        before = staged_in_host(ground)
        for _ in range(2):
            await ground.hand_over()
        assert line.device is None and caplog.text.count("out of memory") == 1
        assert staged_in_host(ground) == before + 2 * LARGE.layers


@PATIENT
async def test_a_gpu_is_asked_for_memory_again_when_the_link_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pushing() as ground:
        line, device = next(iter(lines_of(ground))), worker_of(ground).routes.peers
        nbytes = line.max_bytes
        line._do_without(line.device, GPUFailed("out of memory"))
        assert line.device is None
        peer_of(ground).abort()
        await ground.hand_over()  # the first one waits for no dialling
        assert (line.device, line.max_bytes) == (device.device, nbytes)
        before = staged_in_host(ground)
        await ground.hand_over()
        assert staged_in_host(ground) == before


async def test_kernels_are_ready_before_the_first_peer_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pushing() as ground:
        worker, connected, ready = worker_of(ground), list[int](), BlockMoves.open

        async def get_ready(moves: BlockMoves) -> None:
            connected.append(worker.routes.peers.connected)
            await ready(moves)

        monkeypatch.setattr(BlockMoves, "open", get_ready)
        worker._registered().close()
        worker.register_kv_caches(ground.prefill.caches[0].layers)  # after start()
        peer_of(ground).abort()
        for _ in range(2):
            await ground.hand_over()
        assert connected == [0]


def lines_of(ground: P2PGround) -> Any:
    return worker_of(ground).routes.peers._lines.values()


@contextlib.contextmanager
def puts_held(monkeypatch: pytest.MonkeyPatch, at: int = 1) -> Any:
    """Yield what lets puts from the GPU go on, from the one with that number on."""
    go_on, count, put = asyncio.Event(), [0], RemoteWriter.put_staged

    async def held(writer: RemoteWriter, *args: Any) -> None:
        count[0] += 1
        if count[0] >= at:
            await go_on.wait()
        await put(writer, *args)

    monkeypatch.setattr(RemoteWriter, "put_staged", held)
    yield go_on


@PATIENT
async def test_a_step_does_not_wait_until_layers_have_left_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pushing() as ground:
        before = staged_in_host(ground)
        with puts_held(monkeypatch) as go_on:
            name = await step(ground)
            assert worker_of(ground).statistics().saving == 1
            assert taken_on_gpu(ground) == LARGE.layers * LARGE_NBYTES
            go_on.set()
        await check_loads(ground, name)
        assert staged_in_host(ground) == before


async def step(ground: P2PGround) -> str:
    """Save, and overwrite the blocks as soon as the engine may go on."""
    ground.begin_save(name := ground.new_name())
    async with asyncio.timeout(ENDS_S):
        await worker_of(ground).wait_for_save()
    ground.prefill.caches[0].spoil()
    return name


def begin_step(ground: P2PGround) -> tuple[str, asyncio.Task[None]]:
    ground.begin_save(name := ground.new_name())
    return name, asyncio.create_task(worker_of(ground).wait_for_save())


async def ended(ground: P2PGround, name: str, *, failed: bool = False) -> None:
    worker = worker_of(ground)
    await until_saved(worker)
    results = worker.get_finished()
    assert results.failed_sending == ({f"p {name}"} if failed else frozenset())
    ground.prefill.clear()
    await until(lambda: not worker.statistics().staged_bytes)


async def check_loads(ground: P2PGround, name: str) -> None:
    """Let the save end well, and look at every byte of it where it is loaded."""
    await ended(ground, name)
    await ground.load(name)


@CHAOS
async def test_what_finds_no_room_when_its_step_is_over_goes_on_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pushing(model=DEEP, push_buffer_size=5 * 2**19) as ground:
        before = staged_in_host(ground)
        with puts_held(monkeypatch) as go_on:
            name = await step(ground)
            assert taken_on_gpu(ground) == 2 * DEEP_NBYTES
            assert staged_in_host(ground) == before + DEEP.layers - 2
            go_on.set()
        await check_loads(ground, name)


@PATIENT
@CHAOS
async def test_an_engine_that_holds_blocks_has_them_leave_within_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pushing(model=DEEP, push_buffer_size=5 * 2**19) as ground:
        hold_blocks(ground)
        before = staged_in_host(ground)
        with puts_held(monkeypatch) as go_on:
            name, waiting = begin_step(ground)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.4):  # longer than a step may wait
                    await asyncio.shield(waiting)
            go_on.set()
            await waiting
        await check_loads(ground, name)
        assert staged_in_host(ground) == before


@CHAOS
async def test_blocks_that_are_wanted_back_go_on_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pushing(model=DEEP, push_buffer_size=5 * 2**19) as ground:
        worker = hold_blocks(ground)
        with puts_held(monkeypatch) as go_on:
            name, waiting = begin_step(ground)
            await until_blocked(waiting)
            worker.let_go_of_blocks({f"p {name}"})
            async with asyncio.timeout(ENDS_S):
                await waiting
            ground.prefill.caches[0].spoil()
            go_on.set()
        await check_loads(ground, name)


@contextlib.asynccontextmanager
async def one_of_two_by_host(patch: pytest.MonkeyPatch) -> AsyncIterator[P2PGround]:
    """Yield engines where nothing leads to the second rank's GPU any more, and there is
    no room for what leaves for the first's, until puts may go on."""
    async with pushing(model=ToyModel(layers=3, head_dim=192), sizes=(1, 2)) as ground:
        first, second = [line._peer.routes for line in lines_of(ground)]
        staging = GpuRoutes.staging

        def of_first(routes: GpuRoutes, link: Link | None, nbytes: int) -> Any:
            return None if routes is second else staging(routes, link, nbytes)

        patch.setattr(GpuRoutes, "staging", of_first)
        spec = TensorSpec((first.room._growth.arena.pages.free_bytes,), "uint8")
        (filler,) = await first.room.take([spec], set())
        yield ground
        filler.release()


@CHAOS
@pytest.mark.parametrize("is_held", [False, True])
async def test_blocks_are_not_left_while_one_target_takes_what_came_to_the_host(
    monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    async with one_of_two_by_host(monkeypatch) as ground:
        worker = hold_blocks(ground) if is_held else worker_of(ground)
        (first, _) = [line._peer.routes for line in lines_of(ground)]
        name = await step(ground)
        assert not first.room._line  # what is there is not gathered any more
        await check_loads(ground, name)
        assert worker.statistics().late_saves == 0


async def test_no_memory_is_taken_for_what_is_not_computed() -> None:
    async with pushing() as ground:
        assert ground.prefill.gpu is not None
        gate = Gate()
        ground.prefill.gpu.tensors.stream(0).add(gate)
        name, waiting = begin_step(ground)
        await until_blocked(waiting)
        assert not taken_on_gpu(ground)
        gate.open()
        await waiting
        await check_loads(ground, name)


@PATIENT
@pytest.mark.parametrize("number", [1, 2, 4])
@APART
async def test_a_peer_that_is_lost_keeps_no_memory(
    monkeypatch: pytest.MonkeyPatch, are_apart: bool, number: int
) -> None:
    async with pushing(are_apart) as ground:
        with puts_held(monkeypatch, number):
            ground.begin_save(name := ground.new_name())
            await until(lambda: taken_on_gpu(ground) > 0)
            peer = peer_of(ground)
            ground.decode.workers[0].abort()
            await worker_of(ground).wait_for_save()
            worker_of(ground)._transfers.cancel(f"p {name}", "send")
            await until_saved(worker_of(ground))
            assert worker_of(ground).get_finished().failed_sending == {f"p {name}"}
            await until(lambda: not SharedPuts(peer).staged_bytes)


@PATIENT
@pytest.mark.parametrize("number", [1, 3])
async def test_a_save_that_is_given_up_keeps_no_memory(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async with pushing() as ground:
        with puts_held(monkeypatch, number):
            name = await step(ground)
            assert taken_on_gpu(ground) > 0
            worker_of(ground)._transfers.cancel(f"p {name}", "send")
            await ended(ground, name, failed=True)
        await until(lambda: not taken_on_gpu(ground))


async def test_a_link_that_is_lost_ends_the_wait_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pushing(model=DEEP, push_buffer_size=2**21) as ground:
        other, peer = ground.new_name(), peer_of(ground)
        specs = worker_of(ground)._registered().caches.specs(((5, 2, 7),))
        async with contextlib.AsyncExitStack() as stack:
            opening = peer.lookup.open_insert([1], None, specs, entry_id=other)
            writer = await stack.enter_async_context(opening)
            assert isinstance(writer, RemoteWriter)
            some = list(specs.values())[:2]
            taken = await writer.room(some)
            assert taken is not None
            waiting = asyncio.create_task(writer.room(some))
            await until_blocked(waiting)
            peer._linked().abort()
            with pytest.raises(Exception, match="lost|aborted|closed"):
                await waiting
            for one in taken:
                one.release()
            with pytest.raises(Exception, match="lost|aborted|closed"):
                await writer.room(some)
            with pytest.raises(Exception, match="lost|aborted|closed"):
                await stack.aclose()


async def test_a_gpu_that_fails_to_gather_fails_the_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pushing() as ground:

        async def fail(*args: object) -> None:
            raise GPUFailed("an illegal access")

        with monkeypatch.context() as patch:
            patch.setattr(BlockMoves, "gather_there", fail)
            name = await step(ground)
            await ended(ground, name, failed=True)
        assert not taken_on_gpu(ground)
        order = ground.load_request(name)
        with pytest.raises(AssertionError, match="an illegal access"):
            await ground.begin_load(order)
            await ground.end_load(order)
        ground.decode.clear()
        await ground.hand_over()


@PATIENT
async def test_what_was_on_its_way_by_nccl_goes_on_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pushing(True) as ground:
        with puts_held(monkeypatch, 2) as go_on:
            ground.begin_save(name := ground.new_name())
            await until(lambda: taken_on_gpu(ground) > 0)
            peer = peer_of(ground)
            way = peer.routes.nccl(peer._linked())
            assert way is not None
            way._on_lost(GPUFailed("the way was lost"))
            go_on.set()
            await worker_of(ground).wait_for_save()
        ground.prefill.caches[0].spoil()
        await check_loads(ground, name)
        before = staged_in_host(ground)
        await ground.hand_over()
        assert staged_in_host(ground) == before + LARGE.layers
        await until(lambda: not taken_on_gpu(ground))


@PATIENT
@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=CHAOS)])
@APART
async def test_heads_of_several_ranks_come_to_where_they_belong(
    are_apart: bool, sizes: tuple[int, int]
) -> None:
    model = ToyModel(layers=3, head_dim=192)
    async with pushing(are_apart, model, sizes=sizes) as ground:
        before = [w.statistics().staged_saves for w in ground.prefill.workers]
        await ground.hand_over()
        after = [w.statistics().staged_saves for w in ground.prefill.workers]
        assert after == before


async def test_a_buffer_that_is_full_takes_no_memory_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, move_to_host, stop = list[str](), P2PSave.move_to_host, P2PSave.stop_waiting

    def note_move(save: P2PSave) -> None:
        said.append("move")
        move_to_host(save)

    def note_stop(save: P2PSave) -> None:
        said.append("stop")
        stop(save)

    monkeypatch.setattr(P2PSave, "move_to_host", note_move)
    monkeypatch.setattr(P2PSave, "stop_waiting", note_stop)
    async with pushing() as ground:
        said.clear()
        (buffer,) = ground.buffers().values()
        assert isinstance(buffer, LookupBuffer)
        room, before = buffer.statistics().max_bytes - 2**17, staged_in_host(ground)
        filler = await buffer.insert(
            [0], None, torch.zeros(room, dtype=torch.uint8), None, None
        )
        name = await step(ground)
        assert not taken_on_gpu(ground)
        assert staged_in_host(ground) == before + LARGE.layers
        assert said[0] == "move"  # it left before steps could wait no longer
        assert worker_of(ground).statistics().late_saves == 0
        await buffer.withdraw(filler)
        await check_loads(ground, name)


async def test_who_decodes_is_closed_without_waiting_for_those_who_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "_LEAVE_S", 3600.0)
    async with pushing() as ground, asyncio.timeout(5):
        await ground.hand_over()
        (worker,) = ground.decode.workers
        await worker.aclose()

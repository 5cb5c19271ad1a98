"""What a peer puts from its GPU into buffers on one, by each way there is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from asynckv import (
    ChecksumError,
    EntryConflict,
    GPUFailed,
    KVBlocks,
    PeerLost,
    TensorSpec,
    connect,
)
from asynckv.buffers.remote.insert import RemoteWriter
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.options import Digest
from asynckv.protocol.frames import Cancelled
from asynckv.testing import LOOKUP_CHECKS, until
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
    noise,
    started,
)
from asynckv.transfers.read_route import IpcRoute
from asynckv.transfers.source import release_staged
from asynckv.waits.waiting import wait_shielded
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, SharedPuts, open_gpu_pair
from harness.gpu_puts import (
    LAYERS,
    PutPair,
    PutWay,
    check_is_in,
    insert,
    open_put_pair,
    put_layers,
)
from harness.held_copies import held_copies, is_busy

BY_HANDLES = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")
PIECE = 32 * 1024
"""Too long to ride, and too short to be a value's own."""

BY_IPC = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

DIGESTS = pytest.mark.parametrize("digest", ["full", "edges", "off"])


@pytest.fixture(params=[pytest.param("cuda_ipc", marks=BY_IPC), "nccl"])
def way(request: pytest.FixtureRequest) -> PutWay:
    found: PutWay = request.param
    return found


@pytest.fixture
async def put_pair(two_gpus: FakeGpus, way: PutWay) -> AsyncIterator[PutPair]:
    async with open_put_pair(two_gpus, way) as put_pair:
        yield put_pair


async def test_what_was_put_is_sent_on_with_its_digest(
    put_pair: PutPair, way: PutWay
) -> None:
    await insert(put_pair)
    (entry,) = put_pair.buffer.ledger.table.entries.values()
    assert all(part.digest for part in entry.parts)
    found = await put_pair.peer.lookup.drop_select([1])
    assert is_same(only(found.key), noise(MIB, 1))
    assert put_pair.has_moved == (way == "nccl")


async def test_each_tensor_is_put_from_wherever_it_was(
    put_pair: PutPair, way: PutWay
) -> None:
    gpu, host = put_pair.theirs.tensor, noise(MIB, 2).view(4, -1)
    pool = gpu(noise(MIB, 3).view(8, -1))
    await put_pair.peer.lookup.insert(
        [1],
        None,
        {"a": gpu(noise(MIB, 1)), "b": host, "c": KVBlocks(pool, [5, 1, 2])},
        {"a": gpu(noise(MIB, 4).view(16, -1)).t(), "b": KVBlocks(host, [3, 0])},
        gpu(noise(8)),
        extras={"little": noise(9), "some": gpu(noise(PIECE, 5))},
    )
    assert put_pair.has_put == (way != "nccl")  # which takes no memory of the host
    await until(lambda: not put_pair.puts.staged_bytes)
    entry = await put_pair.buffer.drop_select([1])
    assert isinstance(entry.key, dict) and isinstance(entry.value, dict)
    assert is_same(entry.key["a"], noise(MIB, 1)) and is_same(entry.key["b"], host)
    assert is_same(entry.key["c"], noise(MIB, 3).view(8, -1)[[5, 1, 2]])
    assert is_same(entry.value["a"], noise(MIB, 4).view(16, -1).t().contiguous())
    assert is_same(entry.value["b"], host[[3, 0]])
    assert is_same(entry.extras["little"], noise(9))
    assert is_same(entry.extras["some"], noise(PIECE, 5))


async def test_a_tensor_of_another_gpu_goes_through_host_memory(
    put_pair: PutPair,
) -> None:
    other = fake_device_of(put_pair.theirs.process, 1 - put_pair.theirs.index)
    await put_pair.peer.lookup.insert([1], None, other.tensor(noise(MIB)), None, None)
    assert is_same(only((await put_pair.buffer.drop_select([1])).key), noise(MIB))
    assert not put_pair.has_put


async def test_few_bytes_ride_with_their_frame(put_pair: PutPair) -> None:
    key = put_pair.theirs.tensor(noise(PIECE))
    await put_pair.peer.lookup.insert([1], None, key, None, None)
    assert is_same(only((await put_pair.buffer.drop_select([1])).key), noise(PIECE))
    assert not put_pair.has_put


@DIGESTS
async def test_an_entry_is_known_again_whatever_is_compared(
    two_gpus: FakeGpus, way: PutWay, digest: Digest
) -> None:
    async with open_put_pair(two_gpus, way, serves=digest, digest=digest) as put_pair:
        await insert(put_pair, entry_id="it")
        assert put_pair.has_put
        await insert(put_pair, entry_id="it")
        if digest != "off":
            with pytest.raises(EntryConflict):
                await insert(put_pair, 2, entry_id="it")
        await check_is_in(put_pair)


async def test_an_insert_that_was_selected_while_it_waited_comes_again_with_room(
    put_pair: PutPair,
) -> None:
    other = await put_pair.buffer.insert([2], None, noise(15 * MIB), None, None)
    inserting = asyncio.create_task(insert(put_pair))
    await until(lambda: put_pair.buffer.statistics().waiting_inserts == 1)
    with pytest.raises(ZeroDivisionError):
        async with put_pair.buffer.drop_select([1]) as entry:
            assert is_same(only(entry.key), noise(MIB, 1))
            del entry
            raise ZeroDivisionError
    assert not put_pair.has_put
    assert await put_pair.buffer.withdraw(other)
    await inserting
    assert put_pair.has_put
    await check_is_in(put_pair)


# Other bytes than were put.
async def wrong(*anything: object) -> list[bytes]:
    return [b"of other bytes.."]


async def test_other_bytes_than_were_put_are_not_inserted(
    monkeypatch: pytest.MonkeyPatch, put_pair: PutPair, way: PutWay
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            put_pair.peer.pool, "edges" if way == "cuda_ipc" else "digest", wrong
        )
        with pytest.raises(ChecksumError):
            await insert(put_pair)
        with pytest.raises(ChecksumError):
            async with put_pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
                await writer.put("key", put_pair.theirs.tensor(noise(MIB)))
    await put_pair.emptied()
    assert put_pair.peer.transport == way and put_pair.puts.are_read == (
        way == "cuda_ipc"
    )
    await insert(put_pair)
    await check_is_in(put_pair)


@pytest.mark.chaos
@pytest.mark.parametrize("check", LOOKUP_CHECKS, ids=lambda check: check.__name__)
async def test_a_served_lookup_on_a_gpu_keeps_what_every_one_keeps(
    two_gpus: FakeGpus, way: PutWay, check: LookupCheck
) -> None:
    async with open_put_pair(two_gpus, way, buffer_bytes=LOOKUP_MAX_BYTES) as put_pair:
        there = fake_device_of(two_gpus.process(), put_pair.theirs.index).device
        async with connect(
            put_pair.server.url, device=there, max_bytes="16MiB"
        ) as producer:
            assert producer.transport == way
            assert SharedPuts(producer).are_read == (way == "cuda_ipc")
            await check(producer.lookup, put_pair.peer.lookup, put_pair.buffer)


BY_HOST = "goes through host memory from here on"


@BY_HANDLES
async def test_what_has_no_room_on_the_way_goes_through_host_memory(
    gpus: FakeGpus,
) -> None:
    async with open_gpu_pair(gpus, max_bytes=4 * MIB) as pair:
        key, value = (pair.theirs.tensor(noise(3 * MIB, salt)) for salt in (1, 2))
        await pair.peer.lookup.insert([1], None, key, value, None)
        assert pair.puts.are_read and not pair.puts.has_shown
        entry = await pair.buffer.drop_select([1])
        assert is_same(only(entry.key), noise(3 * MIB, 1))
        assert is_same(only(entry.value), noise(3 * MIB, 2))
        await insert(pair)
        assert pair.puts.has_shown
        await check_is_in(pair)


@BY_HANDLES
async def test_what_is_made_in_room_of_the_gpu_goes_from_there(pair: GpuPair) -> None:
    specs = {"key": LAYERS["key"]}
    async with pair.peer.lookup.open_insert([1], None, specs) as writer:
        assert isinstance(writer, RemoteWriter)
        assert await writer.room([LAYERS["hidden"]]) is None
        (made,) = await writer.room([*specs.values()]) or []
        await pair.peer.routes.pool.copy([noise(MIB)], [made.place()])
        await writer.put_staged("key", made)
        made.release()
    with pytest.raises(RuntimeError, match="left already"):
        await writer.put_staged("key", made)
    assert pair.puts.has_shown
    entry = await pair.buffer.drop_select([1])
    assert is_same(only(entry.key), noise(MIB))
    del entry
    await pair.emptied()


@BY_HANDLES
async def test_who_waits_for_room_fails_when_the_link_is_lost(gpus: FakeGpus) -> None:
    spec = TensorSpec((3 * MIB,), "uint8")
    async with open_gpu_pair(gpus, max_bytes=4 * MIB) as pair:
        assert pair.peer.lookup.sends_from == "cuda:0"
        with pytest.raises(PeerLost):
            async with pair.peer.lookup.open_insert([1], None, {"key": spec}) as writer:
                assert isinstance(writer, RemoteWriter)
                taken = await writer.room([spec]) or []
                waiting = await started(writer.room([spec]))
                pair.peer._linked().abort()
                await asyncio.wait([waiting])
                release_staged(taken)
                with pytest.raises(PeerLost):
                    await writer.room([spec])
                await waiting


@BY_HANDLES
async def test_an_url_that_asks_for_lanes_shows_nothing(gpus: FakeGpus) -> None:
    for url in ("?payload=inline", "?payload=map"):
        async with open_gpu_pair(gpus, url=url) as pair:
            await insert(pair)
            assert not pair.puts.are_read
            assert pair.peer.lookup.sends_from == "cpu"
            await check_is_in(pair)


# What is lost on the way.
class Held:
    """What the buffers' side reads, until it is let go, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self._may_go_on = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None
        self._copy = IpcRoute._copy
        hold = self._hold

        async def copy(arrivals: IpcRoute, *places: Any) -> None:
            await hold(arrivals, *places)

        monkeypatch.setattr(IpcRoute, "_copy", copy)

    def release(self, error: Exception | None = None) -> None:
        self.error = error
        self._may_go_on.set()

    async def _hold(self, arrivals: IpcRoute, *places: Any) -> None:
        self.has_begun.set()
        await self._may_go_on.wait()
        if self.error is not None:
            raise self.error
        await self._copy(arrivals, *places)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


@BY_HANDLES
@pytest.mark.parametrize("put", [insert, put_layers])
async def test_what_cannot_be_read_goes_on_through_host_memory(
    pair: GpuPair,
    held: Held,
    caplog: pytest.LogCaptureFixture,
    put: Callable[[GpuPair], Coroutine[Any, Any, None]],
) -> None:
    putting = asyncio.create_task(put(pair))
    await held.has_begun.wait()
    assert pair.puts.staged_bytes == MIB
    held.release(GPUFailed("it has fallen off the bus"))
    await putting
    await check_is_in(pair)
    await until(lambda: caplog.text.count(BY_HOST) == 2)
    assert not pair.puts.are_read and pair.peer.transport == "cuda_ipc"
    await put(pair)
    await check_is_in(pair)
    assert caplog.text.count(BY_HOST) == 2


@BY_HANDLES
async def test_a_link_that_is_cut_is_shown_again_and_the_entry_read(
    pair: GpuPair, held: Held
) -> None:
    inserting = asyncio.create_task(insert(pair))
    await held.has_begun.wait()
    pair.peer._linked().abort()
    held.release()
    await inserting
    assert pair.puts.has_shown
    await check_is_in(pair)


async def cancel_when_read(pair: GpuPair, putting: asyncio.Task[None]) -> None:
    """Cancel it as soon as the buffers' GPU reads what is put."""
    await until(lambda: is_busy(pair.ours.process))
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting


@BY_HANDLES
@pytest.mark.parametrize("put", [insert, put_layers])
async def test_a_copy_is_kept_while_it_is_read_for_a_call_that_was_cancelled(
    pair: GpuPair,
    put: Callable[[GpuPair], Coroutine[Any, Any, None]],
) -> None:
    with held_copies(pair.ours.process, have_begun=True):
        await cancel_when_read(pair, asyncio.create_task(put(pair)))
        await pair.peer.lookup.peek([1])  # all that was said before is heard
        assert pair.puts.staged_bytes == MIB
    await pair.emptied()
    await put(pair)
    await check_is_in(pair)


@BY_HANDLES
async def test_copies_are_kept_while_they_are_read_however_often_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair
) -> None:
    reading, ended = list[asyncio.Future[None]](), list[int]()

    async def copy(arrivals: IpcRoute, *places: Any) -> None:
        reading.append(asyncio.get_running_loop().create_future())
        await wait_shielded(reading[-1])

    monkeypatch.setattr(IpcRoute, "_copy", copy)
    two = {"a": noise(MIB, 1), "b": noise(MIB, 2)}
    inserting = asyncio.create_task(pair.peer.lookup.insert([1], None, two, {}, None))
    await until(lambda: len(reading) == 2)
    (served,) = [
        task for task in asyncio.all_tasks() if "ServedInsert" in repr(task.get_coro())
    ]
    served.add_done_callback(lambda task: ended.append(1))
    inserting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await inserting
    for one in reading:
        await pair.peer.lookup.peek([1])
        assert not ended and pair.puts.staged_bytes == 2 * MIB
        served.cancel()
        one.set_result(None)
    monkeypatch.undo()
    await pair.emptied()


@BY_HANDLES
async def test_a_layer_that_was_taken_back_is_kept_while_it_is_read(
    pair: GpuPair,
) -> None:
    key = pair.theirs.tensor(noise(MIB, 2))
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        with held_copies(pair.ours.process, have_begun=True):
            putting = asyncio.create_task(writer.put("key", key))
            await cancel_when_read(pair, putting)
            await pair.peer.lookup.peek([1])
            assert pair.puts.staged_bytes == MIB
        await until(lambda: not pair.puts.staged_bytes)
        await writer.put("key", pair.theirs.tensor(noise(MIB, 1)))
        await writer.put("hidden", noise(8))
    await check_is_in(pair)


@BY_HANDLES
async def test_the_last_word_lets_go_of_what_was_taken_back(pair: GpuPair) -> None:
    key = pair.theirs.tensor(noise(MIB, 2))
    with pytest.raises(ValueError, match="key"):
        async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
            with held_copies(pair.ours.process, have_begun=True):
                putting = asyncio.create_task(writer.put("key", key))
                await cancel_when_read(pair, putting)
                assert isinstance(writer, RemoteWriter) and writer._unread
                writer.on_frame(Cancelled(), b"")
                assert not (writer._unread or pair.puts.staged_bytes)
    await pair.emptied()


@BY_HANDLES
async def test_a_peer_that_is_closed_leaves_nothing_open(
    pair: GpuPair, gpus: FakeGpus
) -> None:
    await insert(pair)
    assert pair.ours.process.cuda._opened
    await pair.peer.aclose()
    await until(lambda: not pair.ours.process.cuda._opened)
    key = (await pair.buffer.drop_select([1])).key
    assert is_same(only(key), noise(MIB, 1))

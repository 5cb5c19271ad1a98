"""What connects two GPUs, where it cannot be opened, or breaks: the link goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import types
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import serve
from asynckv.errors import (
    ConfigError,
    GPUFailed,
    IncompatiblePeer,
    PeerLost,
    RemoteProtocolError,
)
from asynckv.links import link as progress
from asynckv.links.link import LinkStream
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Accepted, Frame, OpeningFrame, Ping
from asynckv.protocol.transfer_frames import (
    DeviceMet,
    DeviceReady,
    Devices,
    OpenDevices,
)
from asynckv.sharing import gpu_channel
from asynckv.sharing.gpu_channel import MAX_UNHEARD, DeviceStream, GpuLink
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import (
    CancelMode,
    Outcome,
    sweep_cancellation,
)
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transports.nccl import transport, worker as workers
from asynckv.transports.nccl.worker import DeviceWorker
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import NcclBuffers, open_nccl_buffers
from harness.link_pairs import LinkPair, ScriptedService, linked
from harness.nccl_pairs import NcclPair

BY_HOST = "goes through host memory"
IN_VAIN = {"the other rank", "the peer's first"}
"""For what the workers wait of a server, and of a peer that it does not hear."""


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[NcclBuffers]:
    async with open_nccl_buffers(two_gpus) as pair:
        yield pair


async def check_comes_by_host(pair: NcclBuffers) -> None:
    await pair.buffer.insert([2], None, noise(MIB), None, None)
    entry = await pair.peer.lookup.drop_select([2])
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(MIB)) and pair.peer.transport == "inline"


async def stalled_select(pair: NcclBuffers, **options: Any) -> asyncio.Task[KVEntry]:
    """Select what does not come: the buffer's NCCL posts nothing that is seen."""
    pair.ours.process.nccl.is_silent = True
    await pair.buffer.insert([1], None, noise(MIB), None, None)
    select = pair.peer.lookup.drop_select([1], **options)
    task = asyncio.create_task(taken(select))
    await until(lambda: pair.near_way.transport.receiver.is_busy)
    return task


async def taken(select: Awaitable[KVEntry]) -> KVEntry:
    return await select


async def test_versions_that_differ_are_no_way(
    two_gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with open_nccl_buffers(two_gpus, their_nccl=1) as pair:
        await check_comes_by_host(pair)
        await check_comes_by_host(pair)
    assert caplog.text.count(BY_HOST) == 1 and "NCCL 1 here" in caplog.text


@pytest.mark.usefixtures("lacking_nccl")
async def test_without_nccl_there_is_no_way(
    two_gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with open_nccl_buffers(two_gpus) as pair:
        await check_comes_by_host(pair)
    assert caplog.text.count(BY_HOST) == 1 and "no NCCL here" in caplog.text


async def test_a_url_that_asks_for_lanes_gets_them(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus, url="?payload=inline") as pair:
        await check_comes_by_host(pair)


@pytest.mark.parametrize("end", ["way", "near_way"])
async def test_after_a_worker_was_given_up_the_link_goes_on(
    pair: NcclBuffers, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    way = getattr(pair, end)
    way.transport._worker.give_up(GPUFailed("it is stuck"))
    await until(lambda: pair.peer.transport == "inline")
    await check_comes_by_host(pair)
    assert "from here on" in caplog.text


@pytest.mark.parametrize("end", ["way", "near_way"])
async def test_what_was_under_way_when_the_way_broke_comes_by_host(
    pair: NcclBuffers, end: str
) -> None:
    select = await stalled_select(pair)
    getattr(pair, end)._stalled(PeerLost("nothing has come for long"))
    assert is_same((await select).key, noise(MIB))  # type: ignore[arg-type]
    assert pair.peer.transport == "inline" and not pair.peer.budget.used_bytes


async def test_small_parts_that_do_not_come_end_the_link(
    pair: NcclBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(*anything: object, **options: object) -> list[bytes]:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    await pair.buffer.insert([1], None, noise(MIB), None, noise(8))
    with monkeypatch.context() as patch:
        patch.setattr(progress, "STALL_S", 0.3)
        patch.setattr(pair.buffer.pool, "copy", wait)
        async with asyncio.timeout(10):
            with pytest.raises(PeerLost, match="stood still"):
                await pair.peer.lookup.drop_select([1])
    await until(lambda: not pair.buffer.statistics().leased)


async def test_memory_that_a_lost_gpu_may_write_to_gets_no_other_bytes(
    pair: NcclBuffers,
) -> None:
    into = {"key": pair.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))}
    select = await stalled_select(pair, into=into)
    worker = pair.near_way.transport._worker
    worker.give_up(GPUFailed("it is stuck"))
    with pytest.raises(GPUFailed, match="it is stuck"):
        await select
    again = await pair.peer.lookup.drop_select([1])
    assert is_same(again.key, noise(MIB))  # type: ignore[arg-type]
    while worker._gpu._operations:  # else who frees waits for them in vain
        worker._gpu.end_operation()


async def test_a_link_that_is_cut_is_connected_again(pair: NcclBuffers) -> None:
    select = await stalled_select(pair)
    pair.ours.process.nccl.is_silent = False
    pair.peer._linked().abort()
    assert is_same((await select).key, noise(MIB))  # type: ignore[arg-type]
    assert pair.peer.transport == "nccl" and pair.has_moved


async def test_a_link_that_was_cut_is_kept_by_nobody(pair: NcclBuffers) -> None:
    link = weakref.ref(pair.peer._linked())
    pair.peer._linked().abort()
    await until(lambda: pair.peer.is_connected and pair.peer.transport == "nccl")

    def is_gone() -> bool:
        gc.collect()
        return link() is None

    await until(is_gone)


@asynccontextmanager
async def dying_peer(gpus: FakeGpus) -> AsyncIterator[tuple[NcclBuffers, Peer]]:
    """Connect one more that leaves the server's worker alone, in the middle of NCCL."""
    gpu = fake_device_of(gpus.process(), 1)
    gpu.process.nccl.is_silent = True
    async with open_nccl_buffers(gpus) as pair:
        worker = pair.way.transport._worker
        peer = connect(pair.server.url, device=gpu.device, max_bytes="4MiB")
        entering = asyncio.create_task(peer.__aenter__())
        await until(lambda: set(gpus.kept) == IN_VAIN)
        worker._blocked_s = 0.0  # for long, from here on
        try:
            await entering
            yield pair, peer
        finally:
            gpus.release()  # a real worker would be given up after a minute
            await peer.aclose()


async def test_a_peer_that_dies_while_both_meet_holds_nobody_up(
    two_gpus: FakeGpus,
) -> None:
    async with dying_peer(two_gpus) as (pair, peer):
        await until(lambda: pair.peer.transport == "inline")
        await check_comes_by_host(pair)
        await pair.buffer.insert([3], None, noise(MIB), None, None)
        entry = await peer.lookup.drop_select([3])
        assert is_same(entry.key, noise(MIB))  # type: ignore[arg-type]
        assert peer.transport == "inline"
        worker = workers._workers[pair.ours.process.cuda, 0]
        assert worker.is_blocked and worker.error is None


async def test_who_comes_while_a_worker_is_blocked_does_not_wait(
    two_gpus: FakeGpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with dying_peer(two_gpus) as (pair, _):
        caplog.clear()
        where = fake_device_of(two_gpus.process(), 1).device
        async with connect(pair.server.url, device=where, max_bytes="1MiB") as late:
            assert late.transport == "inline" and "the other rank" in two_gpus.kept
            assert "waits in NCCL for another peer" in caplog.text


async def test_what_is_under_way_while_a_worker_is_blocked_comes_by_host(
    pair: NcclBuffers, two_gpus: FakeGpus
) -> None:
    pair.ours.process.nccl.is_silent = True
    await pair.buffer.insert([1], None, noise(MIB), None, None)
    into = {"key": pair.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))}
    with kept(pair.near_way.transport._worker) as worker:
        entry = await pair.peer.lookup.drop_select([1], into=into)
        assert is_same(entry.key, noise(MIB))  # type: ignore[arg-type]
        assert pair.peer.transport == "inline" and worker.is_blocked


@contextmanager
def kept(worker: DeviceWorker) -> Iterator[DeviceWorker]:
    """Let a worker be in a call that takes long."""
    entered, returns = threading.Event(), threading.Event()

    def call() -> None:
        entered.set()
        returns.wait(60)

    worker.run(call)
    entered.wait(60)
    worker._blocked_s = 0.0
    try:
        yield worker
    finally:
        returns.set()


async def test_a_cancelled_connect_leaves_both_workers_to_others(
    two_gpus: FakeGpus,
) -> None:
    gpu, other = (
        fake_device_of(two_gpus.process()),
        fake_device_of(two_gpus.process(), 1),
    )
    async with (
        LookupBuffer("1MiB", device=gpu.device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):

        async def use() -> None:
            async with connect(server.url, device=other.device, max_bytes="1MiB"):
                pass

        def users() -> list[int]:
            keys = (gpu.process.cuda, 0), (other.process.cuda, 1)
            return [
                workers._workers[key].users for key in keys if key in workers._workers
            ]

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            await until(lambda: not server._services and not users())

        await sweep_cancellation(use, check, modes=("task", "completion"))


async def meet(met: asyncio.Event) -> None:
    await met.wait()


async def test_a_server_that_leaves_lets_workers_meet_first(pair: NcclBuffers) -> None:
    way, devices = pair.way, pair.devices
    await devices.wait_idle()
    for is_given_up in (True, False):
        met = asyncio.Event()
        way._opening = asyncio.create_task(meet(met))
        leaving = asyncio.create_task(devices.wait_idle())
        await until_blocked(leaving)
        if is_given_up:
            leaving.cancel()
            await asyncio.wait({leaving})
        met.set()
        await asyncio.wait({leaving})
        assert leaving.cancelled() == is_given_up


@pytest.fixture
async def unopened(two_gpus: FakeGpus) -> AsyncIterator[GpuLink]:
    """One end that nobody has opened; its worker has no other user."""
    device = fake_device_of(two_gpus.process()).device
    async with linked() as links:
        way = await GpuLink.make(links.near, device, "edges")
        yield way
        await way.closed()
        assert way._use.worker not in workers._workers.values()


async def test_one_that_was_not_opened_is_closed_at_once(unopened: GpuLink) -> None:
    called: list[str] = []
    unopened.call_when_opened(lambda: called.append("it is opened no more"))
    assert called
    await unopened.aclose()
    assert unopened.transport.is_quiet


async def refuse() -> None:
    raise ConfigError("no room for it")


async def test_who_has_asked_hears_why_it_is_not_opened(two_gpus: FakeGpus) -> None:
    def answer(stream: LinkStream, frame: Any, body: bytes) -> None:
        channel = DeviceStream.answer(stream)
        answering.set_result(far.answer(channel, frame.description, refuse))

    answering = asyncio.get_running_loop().create_future()
    gpus = [fake_device_of(two_gpus.process(), n).device for n in range(2)]
    async with linked(answer=answer) as links:
        near = await GpuLink.make(links.near, gpus[0], "off")
        far = await GpuLink.make(links.far, gpus[1], "off")
        asking = asyncio.create_task(near.ask())
        for one in (await answering, asking):
            with pytest.raises(ConfigError, match="no room"):
                await one
        await asyncio.gather(near.closed(), far.closed())


async def test_what_is_opened_for_nobody_is_not_waited_for_but_closes_itself(
    unopened: GpuLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_channel, "_CLOSE_S", 0.01)
    met, left = asyncio.Event(), list[str]()
    opening = asyncio.create_task(unopened.open(met.wait()))
    await until_blocked(opening)
    opening.cancel()
    unopened.call_when_opened(lambda: left.append("the link"))
    await unopened.aclose()
    assert opening.cancelled() and unopened.is_opening and not left
    met.set()
    await unopened.closed()
    assert left and not unopened.is_open


async def test_what_is_opened_for_nobody_may_be_cancelled_with_all_tasks_of_the_loop(
    unopened: GpuLink,
) -> None:
    opening = asyncio.create_task(unopened.open(asyncio.Event().wait()))
    await until_blocked(opening)
    opening.cancel()
    await asyncio.wait({opening})
    tasks = {task.get_name(): task for task in asyncio.all_tasks()}
    left = tasks["asynckv: open NCCL"]
    left.cancel()
    await unopened.closed()
    assert left.cancelled() and not unopened.is_opening


async def test_nothing_meets_before_what_it_takes_is_prepared(
    two_gpus: FakeGpus,
) -> None:
    gpus = [fake_device_of(two_gpus.process(), number).device for number in (0, 1)]
    asked, ready = list[str](), asyncio.Event()

    async def prepare() -> None:
        asked.append("memory")
        await ready.wait()

    async with linked() as links:
        far = await GpuLink.make(links.far, gpus[1], "off")
        said = Devices(far.transport.describe())
        links.service.answer = lambda stream, *_: stream.send(said)
        near = await GpuLink.make(links.near, gpus[0], "off")
        opening = asyncio.create_task(near.ask(prepare))
        await until(lambda: bool(asked))
        await until_blocked(opening)
        assert not links.service.hearers[0].frames and not near.is_opening
        opening.cancel()
        await asyncio.gather(near.closed(), far.aclose())
        assert opening.cancelled()


async def test_one_that_is_opened_in_the_tick_of_a_cancellation_is_closed(
    unopened: GpuLink,
) -> None:
    met = asyncio.Event()
    opening = asyncio.create_task(unopened.open(met.wait()))
    await until_blocked(opening)

    def cancel() -> None:
        opening.cancel()

    unopened.call_when_opened(cancel)
    met.set()
    await unopened.closed()
    assert opening.cancelled() and not unopened.is_open


async def test_a_worker_is_used_until_it_has_left_what_was_closed(
    pair: NcclBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_CLOSE_S", 0.01)
    monkeypatch.setattr(gpu_channel, "_LOOK_AGAIN_S", 0.01)
    key, way = (pair.theirs.process.cuda, 1), pair.near_way
    with kept(way.transport._worker):
        await way.aclose()
        assert not way.transport.is_quiet and workers._workers[key].users == 1
    await until(lambda: key not in workers._workers)
    assert way.transport.is_quiet


class Service(ScriptedService):
    """Opens the far transport for whoever asks."""

    def __init__(self, pair: NcclPair) -> None:
        super().__init__()
        self.pair = pair
        self.opening: asyncio.Task[None] | None = None

    def open(self, stream: LinkStream, frame: OpeningFrame, body: bytes) -> object:  # type: ignore[override]
        assert isinstance(frame, OpenDevices)
        channel = DeviceStream.answer(stream)
        channel.describe(self.pair.far.describe())
        opening = self.pair.far.open(frame.description, channel)
        self.opening = asyncio.create_task(opening)
        return channel


async def open_near(link: LinkPair, pair: NcclPair) -> None:
    channel = DeviceStream(answers=False)
    channel.ask(link.near, pair.near.describe())
    await pair.near.open(await channel.description(), channel)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[tuple[NcclPair, LinkPair]]:
    pair = NcclPair(FakeGpus(2), lambda error: None, lambda error: None)
    async with linked(service=(service := Service(pair))) as link:
        try:
            await open_near(link, pair)
            assert service.opening is not None
            await service.opening
            yield pair, link
        finally:
            await pair.aclose()


async def test_payload_moves_by_what_is_said_on_a_link() -> None:
    async with opened() as (pair, _):
        content = bytes(range(256)) * 64
        source, target = pair.memory(0, content), pair.memory(1, bytes(2**14))
        landed = asyncio.Event()
        pair.far.receive(2, 0, target, lambda digest, error: landed.set())
        pair.near.send(2, 0, source, lambda digest, error: None)
        await landed.wait()
        assert pair.content(1, target) == content


async def test_a_lost_link_ends_the_transport() -> None:
    async with opened() as (pair, link):
        told: list[BaseException | None] = []
        target = pair.memory(0, bytes(4))
        pair.near.receive(1, 0, target, lambda _, error: told.append(error))
        link.near.abort()
        await until(lambda: bool(told))
        assert isinstance(told[0], PeerLost)


async def test_gpus_that_do_not_go_together_are_not_opened() -> None:
    pair = NcclPair(FakeGpus(2), lambda error: None, lambda error: None)
    pair.workers[0].nccl_version = 1
    pair.near._own = type(pair.near._own)("x", 1, b"", b"8 bytes!", 1)
    async with linked(service=Service(pair)) as link:
        with pytest.raises(IncompatiblePeer):
            await open_near(link, pair)
        service = link.service
        assert isinstance(service, Service) and service.opening is not None
        with pytest.raises(IncompatiblePeer):
            await service.opening
    await pair.aclose()


async def test_a_refusal_is_raised() -> None:
    def refuse(stream: LinkStream, frame: OpeningFrame, body: bytes) -> None:
        stream.send(to_failure(ConfigError("no GPU here")))

    pair = NcclPair(FakeGpus(2), lambda error: None, lambda error: None)
    async with linked(answer=refuse) as link:
        with pytest.raises(ConfigError, match="no GPU here"):
            await open_near(link, pair)
    await pair.aclose()


async def test_what_comes_too_soon_is_heard_later() -> None:
    heard: list[Frame] = []
    channel = DeviceStream(answers=True)
    channel.on_frame(DeviceReady(), b"")
    channel.attach(heard.append, lambda error: None)
    channel.on_frame(DeviceMet(1), b"")
    await until(lambda: len(heard) == 2)
    assert heard == [DeviceReady(), DeviceMet(1)]


async def test_too_much_that_nobody_hears_is_refused() -> None:
    channel = DeviceStream(answers=True)
    for _ in range(MAX_UNHEARD):
        channel.on_frame(DeviceReady(), b"")
    with pytest.raises(RemoteProtocolError, match="unheard"):
        channel.on_frame(DeviceReady(), b"")


async def test_what_comes_after_a_refusal_is_heard_by_nobody() -> None:
    heard: list[Frame] = []
    channel = DeviceStream(answers=False)
    channel.attach(heard.append, lambda error: None)
    channel.on_frame(to_failure(ConfigError("no")), b"")
    channel.on_frame(DeviceReady(), b"")
    await asyncio.sleep(0)
    assert not heard


async def test_who_is_detached_hears_nothing_more() -> None:
    heard: list[object] = []
    channel = DeviceStream(answers=True)
    channel.attach(heard.append, heard.append)
    channel.detach()
    channel.on_frame(DeviceReady(), b"")
    channel.on_lost(PeerLost("gone"))
    await asyncio.sleep(0)
    assert not heard


async def test_the_end_is_said_once_and_nothing_after_it() -> None:
    said: list[Frame] = []
    stream: Any = types.SimpleNamespace(send=said.append)
    channel = DeviceStream.answer(stream)
    channel.detach()
    channel.detach()
    channel.give_up(ConfigError("too late"))
    channel.send(DeviceReady())
    assert said == [Accepted()]


@pytest.mark.parametrize(
    ("frame", "body"),
    [(Ping(1), b""), (DeviceReady(), b"x"), (Devices(b""), b"")],
)
async def test_what_makes_no_sense_is_refused(frame: Frame, body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        DeviceStream(answers=True).on_frame(frame, body)

"""Memory of a peer on a GPU: opened, read, closed, and nothing is left of a failure."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import os
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.remote.peer import connect
from asynckv.devices.arena import DeviceAllocation, place_of
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.growth import Growth
from asynckv.devices.imports import (
    ImportedAllocation,
    import_allocation,
    in_thread,
)
from asynckv.errors import ChecksumError, GPUFailed, PeerLost, RemoteProtocolError
from asynckv.links.fd_socket import fetch_file, has_fd_sockets
from asynckv.protocol.frames import Push
from asynckv.protocol.transfer_frames import Exposed
from asynckv.protocol.values import Place
from asynckv.sharing import imports
from asynckv.sharing.exporter import Exporter, Importer
from asynckv.sharing.imports import (
    GpuImport,
    ImportedMemory,
    PeerMemory,
    import_gpu,
)
from asynckv.sharing.mappings import MappedPin
from asynckv.sharing.peer_imports import check_same_host
from asynckv.tensors.views import MISSING_DTYPES, bytes_of, tensor_from
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.testing.pipe_checks import LARGE, PIPE_BYTES
from asynckv.types import DTYPE_NBYTES, TensorSpec
from harness.children import line_of, running
from harness.fake_devices import FakeDevice, fake_device_of
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import Delay, FakeTorchEvent
from harness.gpu_pairs import GpuPair
from harness.gpu_pipe_pairs import IpcPipes, open_ipc_pipes
from harness.link_pairs import LinkPair, linked

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


DTYPES = sorted(DTYPE_NBYTES.keys() - MISSING_DTYPES)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is in use until it is collected stays in use."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_an_entry_is_copied_from_one_process_to_the_other_on_the_gpu(
    pair: GpuPair,
) -> None:
    assert pair.peer.transport == "cuda_ipc"
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    entry = await pair.peer.lookup.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(MIB))
    await until(lambda: not pair.buffer.statistics().used_bytes)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
async def test_a_copy_of_every_dtype_has_the_same_bytes(pair: GpuPair) -> None:
    for name in DTYPES:
        spec = TensorSpec((MIB // DTYPE_NBYTES[name],), name)
        value = tensor_from(bytes_of(noise(MIB)), spec)
        await pair.buffer.insert([1], None, pair.ours.tensor(value), None, None)
        entry = await pair.peer.lookup.drop_select([1])
        assert isinstance(entry.key, torch.Tensor)
        assert is_same(entry.key, value), name


async def test_inside_async_with_there_are_views_and_no_copy(pair: GpuPair) -> None:
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    async with pair.peer.lookup.drop_select([1]) as entry:
        assert isinstance(entry.key, torch.Tensor) and is_same(entry.key, noise(MIB))
        lent = pair.theirs.tensors.memory_of(entry.key).address
        handle = pair.theirs.process.cuda._opened
        assert any(0 <= lent - opened < 2**25 for opened in handle.values())


async def test_a_view_keeps_its_memory_when_its_entry_has_left(pair: GpuPair) -> None:
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    async with pair.peer.lookup.drop_select([1]) as entry:
        key = entry.key
        del entry
    assert pair.buffer.statistics().pinned_bytes == MIB
    assert isinstance(key, torch.Tensor) and is_same(key, noise(MIB))
    del key
    await until(lambda: not pair.buffer.statistics().pinned_bytes)


async def test_memory_is_not_reused_before_the_gpu_has_left_a_view(
    pair: GpuPair,
) -> None:
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    stream = pair.theirs.tensors.stream(0)
    async with pair.peer.lookup.drop_select([1]) as entry:
        stream.add(Delay(20))  # the GPU still reads, whatever became of the tensor
        del entry
    assert pair.buffer.statistics().pinned_bytes == MIB
    await until(lambda: not pair.buffer.statistics().pinned_bytes)
    assert not stream.work


@pytest.mark.parametrize("nbytes", [8, 64 * 1024, MIB])
async def test_what_is_small_comes_to_the_gpu_too(pair: GpuPair, nbytes: int) -> None:
    await pair.buffer.insert([1], None, noise(nbytes), None, noise(8))
    async with pair.peer.lookup.drop_select([1]) as entry:
        assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
        assert is_same(entry.key, noise(nbytes)) and is_same(entry.hidden, noise(8))


async def test_tensors_land_in_memory_of_the_gpu_that_the_caller_has(
    pair: GpuPair,
) -> None:
    for nbytes in (64, MIB):
        await pair.buffer.insert([1], None, noise(nbytes), None, None)
        into = {"key": pair.theirs.tensor(torch.zeros(nbytes, dtype=torch.uint8))}
        entry = await pair.peer.lookup.drop_select([1], into=into)
        assert entry.key is into["key"] and is_same(entry.key, noise(nbytes))


async def test_bytes_that_changed_at_an_edge_are_refused(pair: GpuPair) -> None:
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    (stored,) = pair.buffer.ledger.table.entries.values()
    place = place_of(stored.regions[0], stored.parts[0].spec)
    assert isinstance(place, DeviceMemory)
    pair.ours.process.cuda.view(place)[0] ^= 1
    with pytest.raises(ChecksumError):
        await pair.peer.lookup.drop_select([1])


async def test_an_allocation_is_open_once_however_many_peers_want_it(
    pair: GpuPair,
) -> None:
    (url,) = {pair.peer.url}
    async with connect(url, device=pair.theirs.device, max_bytes="1MiB") as second:
        assert second.transport == pair.peer.transport == "cuda_ipc"
        assert len(pair.theirs.process.cuda._opened) == 1
    assert len(pair.theirs.process.cuda._opened) == 1


@pytest.mark.usefixtures("no_collector")
async def test_a_cancelled_select_gives_the_entry_and_its_memory_back(
    pair: GpuPair,
) -> None:
    async def check(k: int, mode: CancelMode, outcome: Outcome[KVEntry]) -> None:
        if outcome.cancelled:
            entry = await pair.peer.lookup.drop_select([1])
            assert isinstance(entry.key, torch.Tensor)
            assert is_same(entry.key, noise(MIB))

    async def fill() -> None:
        key = pair.ours.tensor(noise(MIB))
        await pair.buffer.insert([1], None, key, None, None)

    select = pair.peer.lookup.drop_select
    await sweep_cancellation(lambda: select([1]), check, before=fill)
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_who_has_no_gpu_gets_entries_through_host_memory(pair: GpuPair) -> None:
    async with connect(pair.peer.url, max_bytes="16MiB") as plain:
        assert plain.transport != "cuda_ipc"
        for nbytes in (64, MIB):
            await pair.buffer.insert([1], None, noise(nbytes), None, None)
            entry = await plain.lookup.drop_select([1])
            assert isinstance(entry.key, torch.Tensor) and not entry.key.is_cuda
            assert is_same(entry.key, noise(nbytes))


async def test_who_asks_for_lanes_gets_it_through_host_memory(pair: GpuPair) -> None:
    device, url = pair.theirs.device, f"{pair.peer.url}?payload=inline"
    async with connect(url, device=device, max_bytes="16MiB") as other:
        await pair.buffer.insert([1], None, noise(MIB), None, None)
        entry = await other.lookup.drop_select([1])
        assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
        assert is_same(entry.key, noise(MIB)) and other.transport == "inline"
        del entry


@pytest.mark.parametrize("nbytes", [64, MIB])
async def test_a_peer_inserts_into_memory_of_a_gpu(pair: GpuPair, nbytes: int) -> None:
    key = pair.theirs.tensor(noise(nbytes))
    await pair.peer.lookup.insert([1], None, key, None, None)
    entry = await pair.buffer.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(nbytes))


@dataclasses.dataclass(frozen=True)
class Both:
    """What is shown, and a process that opens it, with memory of its own."""

    link: LinkPair
    importer: Importer
    exposed: Exposed
    theirs: FakeDevice
    own: Growth

    @property
    def opened(self) -> int:
        return len(self.theirs.process.cuda._opened)

    def open(self) -> Any:
        pages = self.own.device_pages
        assert pages is not None
        return import_gpu(self.exposed, pages.allocation)


@pytest.fixture
async def both(gpus: FakeGpus) -> AsyncIterator[Both]:
    ours, theirs = (fake_device_of(gpus.process()) for _ in range(2))
    shown, own = (Growth(MIB, device=gpu.device) for gpu in (ours, theirs))
    await asyncio.gather(shown.open(), own.open())
    sharing = Exporter(shown.arena, lambda: None, shown.drop_soon)
    async with linked() as link:
        importer = sharing.export(link.far, "edges", ours.process.cuda.uuid(0))
        yield Both(link, importer, importer.exposed, theirs, own)
    sharing.close()
    await sharing.aclose()
    await shown.aclose()
    await own.aclose()


@contextlib.contextmanager
def copied_sockets() -> Iterator[None]:
    """Keep a copy of each socket that memory comes by, as a fork does."""
    with contextlib.ExitStack() as copies, pytest.MonkeyPatch.context() as patch:

        async def fetch(*where: Any) -> tuple[socket.socket, int]:
            sock, fd = await fetch_file(*where)
            for kept in (sock, sock.dup()):
                copies.enter_context(kept)
            return sock, fd

        patch.setattr(imports, "fetch_file", fetch)
        yield


async def test_it_is_open_until_it_is_closed_which_the_owner_hears(both: Both) -> None:
    export, nonce = await both.open()
    assert both.importer.verify(nonce) and both.opened == 1
    in_thread(export.close)
    await until(lambda: not both.importer.is_connected)
    assert not both.opened


async def test_the_owner_hears_it_though_a_forked_child_has_the_socket(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, nonce = await both.open()
    with socket.socket(fileno=os.dup(export.sock.fileno())):  # as a child has it
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            export.close()
        assert both.importer.verify(nonce) and both.opened == 1
        await asyncio.to_thread(export.close)
        await until(lambda: both.importer._connection is None)
    assert not both.opened


async def test_a_forked_child_hangs_up_for_nobody_where_an_opening_ends(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended_in_child(*what: Any) -> Any:
        await until(lambda: both.importer._connection is not None)
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            what[-1]()
        raise GPUFailed("not here")

    monkeypatch.setattr(imports, "open_allocation", ended_in_child)
    with copied_sockets():
        with pytest.raises(GPUFailed, match="not here"):
            await both.open()
        for _ in range(20):
            await asyncio.sleep(0)
        assert both.importer._connection is not None
    await until(lambda: both.importer._connection is None)


async def test_what_cannot_be_opened_is_hung_up(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object) -> Any:
        raise GPUFailed("not here")

    monkeypatch.setattr(both.theirs.process.cuda, "open_memory", fail)
    with pytest.raises(GPUFailed, match="not here"):
        await both.open()
    await until(lambda: both.importer._connection is None)


@pytest.mark.parametrize(
    "claim",
    [
        {"handle": b""},
        {"handle": b"h" * 63},
        {"nbytes": 0},
        {"nbytes": 512},
        {"nbytes": MIB},
        {"nbytes": 2**62},
    ],
)
async def test_what_nobody_exports_is_not_even_connected_to(
    both: Both, claim: dict[str, Any]
) -> None:
    lie = dataclasses.replace(
        both, exposed=msgspec.structs.replace(both.exposed, **claim)
    )
    with pytest.raises(RemoteProtocolError):
        await lie.open()
    assert both.importer._connection is None and not both.opened
    export, nonce = await both.open()  # the ticket is good still
    assert both.importer.verify(nonce)
    in_thread(export.close)
    await until(lambda: not both.opened)


async def test_more_than_was_exported_is_not_opened(both: Both) -> None:
    more = msgspec.structs.replace(both.exposed, nbytes=both.exposed.nbytes + 4096)
    with pytest.raises(GPUFailed):
        await dataclasses.replace(both, exposed=more).open()
    await until(lambda: both.importer._connection is None)
    assert not both.opened


async def test_a_cancelled_opening_hangs_up_when_its_thread_has_closed_it(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    nonce = ImportedAllocation.nonce

    def hold(allocation: ImportedAllocation) -> bytes:
        begun.set()
        may_go_on.wait(10)
        return nonce(allocation)

    monkeypatch.setattr(ImportedAllocation, "nonce", hold)
    opening = asyncio.ensure_future(both.open())
    try:
        await until(begun.is_set)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        for _ in range(3):  # a hang-up would be heard by now
            await asyncio.sleep(0)
        assert both.importer._connection is not None and both.opened
    finally:
        may_go_on.set()
    await until(lambda: both.importer._connection is None)
    assert not both.opened


async def opened_memory(both: Both) -> ImportedMemory:
    export, _ = await both.open()
    assert both.own.allocation is not None
    return ImportedMemory(export, "off", both.own.allocation)


async def test_of_many_views_that_the_gpu_is_at_work_with_few_are_asked_for_at_once(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(event: FakeTorchEvent) -> bool:
        asked.append(event)
        return query(event)

    query, asked, gate = FakeTorchEvent.query, list[FakeTorchEvent](), Gate()
    monkeypatch.setattr(FakeTorchEvent, "query", counted)
    memory = await opened_memory(both)
    pins = [memory.take(number) for number in range(1, 101)]
    both.theirs.tensors.stream(0).add(gate)
    pins.clear()
    while len(asked) < 100:
        before = len(asked)
        await asyncio.sleep(0)
        assert len(asked) - before <= 16
    assert memory.pins == 100 and not memory.has_views
    gate.open()
    memory.link_over()
    await until(lambda: not memory.pins and not both.opened)


def test_a_view_that_outlived_its_loop_may_end_in_the_midst_of_an_opening(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (fake_device_of(gpus.process()).device.opened() for _ in range(2))
    own, *shown = (
        DeviceAllocation(of, of.cuda.malloc(MIB)) for of in (theirs, ours, ours)
    )
    cuda, open_memory = theirs.cuda, theirs.cuda.open_memory

    async def take(sock: socket.socket) -> MappedPin:
        allocation = import_allocation(cuda, 0, shown[0].handle, MIB)
        memory = ImportedMemory(GpuImport(sock, allocation, theirs), "off", own)
        pin = memory.take(1)
        memory.link_over()
        return pin

    def open_meanwhile(handle: bytes, nbytes: int) -> DeviceMemory:
        views.clear()  # as the garbage collector does, at any moment
        return open_memory(handle, nbytes)

    def open_second() -> None:
        import_allocation(cuda, 0, shown[1].handle, MIB).release()

    with contextlib.closing(socket.socket()) as sock:
        views = [asyncio.run(take(sock))]
        monkeypatch.setattr(cuda, "open_memory", open_meanwhile)
        opening = threading.Thread(target=open_second, daemon=True)
        opening.start()
        opening.join(10)
        assert not opening.is_alive()
        for thread in threading.enumerate():
            if thread.name == "asynckv-ipc":
                thread.join()
        assert sock.fileno() < 0


def test_one_thread_waits_for_all_views_that_outlived_their_loop(
    gpus: FakeGpus,
) -> None:
    ours, theirs = (fake_device_of(gpus.process()) for _ in range(2))
    shown, own = (
        DeviceAllocation(gpu.device.opened(), gpu.process.cuda.malloc(MIB))
        for gpu in (ours, theirs)
    )
    gate = Gate()

    async def take(sock: socket.socket) -> list[MappedPin]:
        cuda = theirs.process.cuda
        allocation = import_allocation(cuda, 0, shown.handle, MIB)
        taken = GpuImport(sock, allocation, theirs.device.opened())
        memory = ImportedMemory(taken, "off", own)
        pins = [memory.take(number) for number in range(1, 100)]
        memory.link_over()
        theirs.tensors.stream(0).add(gate)
        return pins

    def waiting() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "asynckv-ipc"]

    with contextlib.closing(socket.socket()) as sock:
        views = asyncio.run(take(sock))
        views.clear()
        assert len(waiting()) == 1
        gate.open()
        while threads := waiting():
            threads[0].join()
        assert sock.fileno() < 0


KEPT_TO_THE_END = """
import builtins
from asynckv.devices.imports import in_thread

class View:
    def __del__(self, in_thread=in_thread):
        in_thread(lambda: print("let go", flush=True))

builtins.kept = View()
"""


@pytest.mark.multiprocess
async def test_a_view_that_is_kept_to_the_end_does_not_keep_the_interpreter() -> None:
    async with running(KEPT_TO_THE_END) as process:
        assert await line_of(process) == "let go"
        assert await process.wait() == 0


async def test_only_a_peer_of_this_boot_and_host_shares_memory(both: Both) -> None:
    check = functools.partial(check_same_host, both.link.near)
    for boot_id in ("", "another"):
        with pytest.raises(ValueError, match="another host"):
            check(boot_id)


SPEC = TensorSpec((LARGE,), "uint8")
TARGET = DeviceMemory(4096, LARGE, 0)


@pytest.fixture
async def pipes(two_gpus: FakeGpus) -> AsyncIterator[IpcPipes]:
    async with open_ipc_pipes(two_gpus) as pipes:
        yield pipes


class Allocation:
    """In place of one that is open here: counts how often it is closed."""

    def __init__(self) -> None:
        self.nbytes = LARGE
        self.memory = DeviceMemory(2**20, LARGE + 512, 0)
        self.how_often = 0
        self.allocation = self

    def close_soon(self, closed: asyncio.Future[None]) -> None:
        self.how_often += 1
        closed.set_result(None)

    def is_closed(self) -> bool:
        return self.how_often > 0


async def wait_for_ever(*places: object) -> None:
    await asyncio.Event().wait()


async def test_it_is_closed_once_and_not_while_it_is_read() -> None:
    told: list[Any] = []
    memory, export = PeerMemory(told.append), Allocation()
    memory.put(export)  # type: ignore[arg-type]
    reading = memory.read(0, TARGET, wait_for_ever, told.append)
    await asyncio.sleep(0)
    memory.close()
    memory.close()
    assert not export.is_closed()
    reading.cancel()
    await until(export.is_closed)
    await memory.aclose()
    assert reading.cancelled() and export.how_often == 1 and not told


async def test_what_is_opened_for_nobody_is_closed() -> None:
    memory, export = PeerMemory(lambda error: None), Allocation()
    memory.close()
    memory.put(export)  # type: ignore[arg-type]
    await memory.aclose()
    assert export.how_often == 1


async def test_what_is_being_closed_is_waited_for() -> None:
    class Slow(Allocation):
        closed: asyncio.Future[None]

        def close_soon(self, closed: asyncio.Future[None]) -> None:
            self.closed = closed

    memory, export = PeerMemory(lambda error: None), Slow()
    memory.put(export)  # type: ignore[arg-type]
    memory.close()
    closing = asyncio.create_task(memory.aclose())
    await until_blocked(closing)
    export.closed.set_result(None)
    await closing


async def test_whoever_reads_is_stopped_at_the_end() -> None:
    memory, export = PeerMemory(lambda error: None), Allocation()
    memory.put(export)  # type: ignore[arg-type]
    reading = memory.read(0, TARGET, wait_for_ever, lambda error: None)
    await memory.aclose()
    assert reading.cancelled()
    await until(lambda: export.how_often == 1)


async def test_a_tensor_may_end_where_the_memory_does() -> None:
    memory = PeerMemory(lambda error: None)
    memory.put(Allocation())  # type: ignore[arg-type]
    memory.check(0, LARGE)
    with pytest.raises(RemoteProtocolError, match="beyond"):
        memory.check(0, LARGE + 1)
    await memory.aclose()


async def test_nothing_is_read_of_what_is_closed() -> None:
    failed: list[Exception] = []
    told: list[Exception | None] = []
    memory = PeerMemory(failed.append)
    await memory.read(0, TARGET, wait_for_ever, told.append)
    assert told == failed and isinstance(told[0], PeerLost)


async def test_what_could_not_be_read_keeps_no_memory() -> None:
    class Owner:
        pass

    async def fail(source: DeviceMemory, target: DeviceMemory) -> None:
        raise GPUFailed("it has fallen off the bus")

    told: list[Exception | None] = []
    memory, owner = PeerMemory(told.append), Owner()
    memory.put(Allocation())  # type: ignore[arg-type]
    kept = weakref.ref(owner)
    target = dataclasses.replace(TARGET, owner=owner)
    reading = memory.read(0, target, fail, told.append)
    del owner, target
    await reading
    assert len(told) == 2 and kept() is None
    await memory.aclose()


@pytest.mark.parametrize(
    ("offset", "what"),
    [(2 * PIPE_BYTES - LARGE + 64, "beyond"), (2**62, "beyond"), (96, "not aligned")],
)
async def test_a_tensor_beyond_the_memory_breaks_the_link(
    pipes: IpcPipes, offset: int, what: str
) -> None:
    place = Place(((offset, LARGE),), 0, 1)
    with pytest.raises(RemoteProtocolError, match=what):
        pipes.far._inbound.on_push(Push(99, spec=SPEC, place=place), b"")


@pytest.mark.parametrize(
    ("spec", "body"), [(TensorSpec((8,), "uint8"), b""), (SPEC, b"-")]
)
async def test_what_is_shared_is_large_and_does_not_ride(
    pipes: IpcPipes, spec: TensorSpec, body: bytes
) -> None:
    push = Push(99, spec=spec, place=Place(((0, spec.nbytes),), 0, 1))
    with pytest.raises(RemoteProtocolError, match="came along|declared size"):
        pipes.far._inbound.on_push(push, body)

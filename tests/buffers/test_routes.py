"""Every verb by every route: the same bytes, once, whatever goes wrong.

What holds of one route alone is tested beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, TypeAlias

import pytest
import torch

from asynckv import (
    ChecksumError,
    EntryAborted,
    GPUFailed,
    KVEntry,
    LeaseLost,
    LookupBuffer,
    Peer,
    PeerLost,
    StoreBuffer,
    TensorSpec,
    connect,
    serve,
)
from asynckv.buffers.entries.entries import EntryState
from asynckv.devices.arena import place_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.tensors.shared_file import MappedFile
from asynckv.testing import (
    CancelMode,
    Outcome,
    sweep_cancellation,
    until,
    until_blocked,
)
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.fake_devices import FakeDevice, fake_device_of
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import open_gpu_pair, open_nccl_buffers

LARGE, SMALL = TensorSpec((MIB,), "uint8"), TensorSpec((8,), "uint8")
LAYERS: Final[Mapping[str, TensorSpec]] = {"key": LARGE, "hidden": SMALL}
CONTENT: Final[Mapping[str, torch.Tensor]] = {"key": noise(MIB), "hidden": noise(8)}
MORE_LAYERS: Final[Mapping[str, TensorSpec]] = {**LAYERS, "value": LARGE}
Memory: TypeAlias = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Ends:
    """A served lookup buffer and a peer of it, and the GPU of each."""

    buffer: LookupBuffer
    peer: Peer
    ours: FakeDevice | None = None
    theirs: FakeDevice | None = None

    def at_peer(self, content: Memory = CONTENT) -> dict[str, torch.Tensor]:
        """Return a copy where the peer has its tensors."""
        copied = torch.clone if self.theirs is None else self.theirs.tensor
        return {name: copied(tensor) for name, tensor in content.items()}

    async def quiet(self) -> None:
        """Wait until nobody has anything of what is stored."""
        await until(lambda: not self.buffer.statistics().leased)
        await until(lambda: not self.buffer.statistics().mapped_by)
        assert not self.peer.budget.used_bytes

    async def emptied(self) -> None:
        """Wait until nothing is stored, and nothing kept for it."""
        await until(lambda: not self.buffer.statistics().entries)
        await until(lambda: not self.buffer.statistics().used_bytes)
        await until(lambda: not self.peer.routes.copies.used_bytes)
        assert not self.peer.lookup.statistics().used_bytes


ROUTES: Final[Mapping[str, str]] = {
    "mem": "mem",
    "link": "inline",
    "map": "map",
    "mem into a GPU": "mem",
    "link into a GPU": "inline",
    "map into a GPU": "map",
    "host to GPU": "map",
    "GPU to host": "inline",
    "cuda_ipc": "cuda_ipc",
    "peer access": "cuda_ipc",
    "nccl": "nccl",
}
"""And the transport by which each is known."""


@contextlib.asynccontextmanager
async def by_host(gpus: FakeGpus, route: str, **options: Any) -> AsyncIterator[Ends]:
    """A buffer in host memory, and a peer: there, or with its tensors on a GPU."""
    gpu = fake_device_of(gpus.process())
    has_gpu = "GPU" in route
    url = "mem://" if route.startswith("mem") else "tcp://127.0.0.1:0"
    end = "?payload=inline" if route.startswith("link") else ""
    if route == "host to GPU":
        options["device"] = gpu.device
    async with (
        LookupBuffer("16MiB", drain_s=0) as buffer,
        serve(url, lookup=buffer) as server,
        connect(server.url + end, max_bytes="16MiB", **options) as peer,
    ):
        if "into" in route:
            peer.pool.lanes = gpu.lanes()
        yield Ends(buffer, peer, None, gpu if has_gpu else None)


@contextlib.asynccontextmanager
async def by_gpus(gpus: FakeGpus, route: str, **options: Any) -> AsyncIterator[Ends]:
    """A buffer on a GPU, and a peer on that one, on another, or on none."""
    if route == "nccl":
        async with open_nccl_buffers(gpus, **options) as pair:
            await pair.opened()
            yield Ends(pair.buffer, pair.peer, pair.ours, pair.theirs)
            assert pair.has_moved or pair.has_put
    elif route == "GPU to host":
        options |= {"device": None, "url": "?payload=inline"}
        async with open_gpu_pair(gpus, **options) as far:
            yield Ends(far.buffer, far.peer, far.ours)
    else:
        gpus.has_peer_access = route == "peer access"
        async with open_gpu_pair(gpus, theirs=gpus.has_peer_access, **options) as near:
            yield Ends(near.buffer, near.peer, near.ours, near.theirs)


@contextlib.asynccontextmanager
async def opened(gpus: FakeGpus, route: str, **options: Any) -> AsyncIterator[Ends]:
    if ROUTES[route] == "map" and not has_fd_sockets():
        pytest.skip("nothing can be mapped here")
    is_on_gpu = route in ("GPU to host", "cuda_ipc", "peer access", "nccl")
    async with (by_gpus if is_on_gpu else by_host)(gpus, route, **options) as ends:
        assert ends.peer.transport == ROUTES[route]
        yield ends
        assert ends.peer.transport == ROUTES[route]


@pytest.fixture(params=ROUTES)
async def ends(
    request: pytest.FixtureRequest, two_gpus: FakeGpus
) -> AsyncIterator[Ends]:
    """Both, connected by one route."""
    async with opened(two_gpus, request.param) as ends:
        yield ends


async def fill(buffer: LookupBuffer) -> None:
    """Insert in the buffer's own process."""
    await buffer.insert([1], None, CONTENT["key"], None, CONTENT["hidden"])


def check(entry: KVEntry) -> None:
    assert is_same(only(entry.key), CONTENT["key"])
    assert is_same(entry.hidden, CONTENT["hidden"])


# Each is given memory of the peer: to put from, or for things to land in.


async def insert(ends: Ends, memory: Memory) -> None:
    await ends.peer.lookup.insert([1], None, memory["key"], None, memory["hidden"])


async def open_insert(ends: Ends, memory: Memory) -> None:
    async with ends.peer.lookup.open_insert([1], None, LAYERS) as writer:
        for name in LAYERS:
            await writer.put(name, memory[name])


async def drop_select(ends: Ends, memory: Memory) -> None:
    check(await ends.peer.lookup.drop_select([1]))


async def drop_select_into(ends: Ends, memory: Memory) -> None:
    entry = await ends.peer.lookup.drop_select([1], into=memory)
    assert (entry.key, entry.hidden) == (memory["key"], memory["hidden"])
    check(entry)


async def borrow(ends: Ends, memory: Memory) -> None:
    async with ends.peer.lookup.drop_select([1]) as entry:
        check(entry)
        assert ends.buffer.statistics().leased == 1
        del entry


async def borrow_into(ends: Ends, memory: Memory) -> None:
    async with ends.peer.lookup.drop_select([1], into=memory) as entry:
        assert entry.key is memory["key"]
        check(entry)


async def stream(ends: Ends, memory: Memory) -> None:
    async with ends.peer.lookup.open_drop_select([1]) as stream:
        found = {name: tensor async for name, tensor in stream}
        assert all(is_same(found[name], CONTENT[name]) for name in LAYERS)
        assert await stream.wait_for("key") is found["key"]
        del found


async def stream_into(ends: Ends, memory: Memory) -> None:
    async with ends.peer.lookup.open_drop_select([1], into=memory) as stream:
        assert await stream.wait_for("key") is memory["key"]
        assert await stream.wait_for("hidden") is memory["hidden"]
        assert all(is_same(memory[name], CONTENT[name]) for name in LAYERS)


async def stream_early(ends: Ends, memory: Memory) -> None:
    """Layers are read while they are written."""
    await ends.buffer.drop_select([1])
    async with (
        ends.buffer.open_insert([1], None, LAYERS) as writer,
        ends.peer.lookup.open_drop_select([1]) as stream,
    ):
        for name, tensor in CONTENT.items():
            await writer.put(name, tensor)
            assert is_same(await stream.wait_for(name), tensor)


Verb: TypeAlias = Callable[[Ends, Memory], Coroutine[None, None, None]]
PUTS: Final[tuple[Verb, ...]] = (insert, open_insert)
INTO: Final[tuple[Verb, ...]] = (drop_select_into, borrow_into, stream_into)
TAKES: Final[tuple[Verb, ...]] = (drop_select, borrow, stream, *INTO)


async def use(ends: Ends, verb: Verb) -> None:
    """Use a verb once: what was put is there, or what was there is taken."""
    memory = ends.at_peer()
    if verb in PUTS:
        await verb(ends, memory)
        check(await ends.buffer.drop_select([1]))
        return
    for tensor in memory.values():
        tensor.zero_()
    await fill(ends.buffer)
    await verb(ends, memory)


@pytest.mark.parametrize("verb", [*PUTS, *TAKES, stream_early])
async def test_every_verb_moves_the_same_bytes_by_every_route(
    ends: Ends, verb: Verb
) -> None:
    for _ in range(2):
        await use(ends, verb)
        await ends.emptied()


@pytest.mark.parametrize("verb", INTO)
async def test_a_place_that_does_not_fit_gives_the_entry_back(
    ends: Ends, verb: Verb
) -> None:
    await fill(ends.buffer)
    with pytest.raises(ValueError, match="key"):
        await verb(ends, ends.at_peer({"key": noise(8)}))
    await ends.quiet()
    await drop_select(ends, {})


def change(ends: Ends, offset: int) -> None:
    """Change a byte of what is stored, where it lies."""
    (stored,) = ends.buffer.ledger.table.entries.values()
    if ends.ours is None:
        stored.regions[0].view()[offset] ^= 1
        return
    place = place_of(stored.regions[0], stored.parts[0].spec)
    assert isinstance(place, DeviceMemory)
    ends.ours.process.cuda.view(place)[offset] ^= 1


@pytest.mark.parametrize("verb", TAKES)
@pytest.mark.parametrize(
    ("route", "digest", "offset"),
    [*((route, "full", MIB // 2) for route in ROUTES), ("cuda_ipc", "edges", 0)],
)
async def test_other_bytes_than_were_put_are_refused_and_given_back(
    two_gpus: FakeGpus, route: str, digest: str, offset: int, verb: Verb
) -> None:
    async with opened(two_gpus, route, digest=digest) as ends:
        await fill(ends.buffer)
        change(ends, offset)
        with pytest.raises(ChecksumError):
            await verb(ends, ends.at_peer())
        await ends.quiet()
        change(ends, offset)
        await verb(ends, ends.at_peer())
        await ends.emptied()


@contextlib.contextmanager
def failing(gpu: FakeDevice) -> Iterator[None]:
    """Let all copies of a GPU fail."""

    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu.process.cuda, "copy", fail)
        yield


@pytest.mark.parametrize(
    ("ends", "verb"),
    [
        *(("GPU to host", verb) for verb in TAKES),
        *(("link into a GPU", verb) for verb in INTO),
        *(("map into a GPU", verb) for verb in INTO),
        *(("host to GPU", verb) for verb in TAKES),
        *(("cuda_ipc", verb) for verb in (stream, stream_into)),
    ],
    indirect=["ends"],
)
async def test_a_gpu_that_fails_gives_the_entry_back(
    caplog: pytest.LogCaptureFixture, ends: Ends, verb: Verb
) -> None:
    gpu = ends.theirs or ends.ours
    assert gpu is not None
    await fill(ends.buffer)
    with failing(gpu), pytest.raises(GPUFailed, match="off the bus") as kept:
        await verb(ends, ends.at_peer())
    caplog.clear()
    await until(lambda: not ends.buffer.statistics().leased)
    assert not ends.peer.budget.used_bytes
    await ends.quiet()  # also while somebody keeps the error
    del kept
    await verb(ends, ends.at_peer())
    await ends.emptied()


@pytest.mark.parametrize("verb", PUTS)
@pytest.mark.parametrize("ends", ["GPU to host"], indirect=True)
async def test_what_a_buffers_gpu_refuses_fails_its_producer(
    caplog: pytest.LogCaptureFixture, ends: Ends, verb: Verb
) -> None:
    assert ends.ours is not None
    with failing(ends.ours), pytest.raises(GPUFailed, match="off the bus"):
        await verb(ends, ends.at_peer())
    caplog.clear()
    await ends.emptied()
    await use(ends, verb)


async def sweep(ends: Ends, verb: Verb) -> None:
    """Cancel a verb everywhere: nothing is lost, or read or written behind its back."""
    memory, entries = ends.at_peer(), ends.buffer.ledger.table.entries

    async def before() -> None:
        for name, tensor in memory.items():
            tensor.copy_(CONTENT[name])
        if verb in TAKES:
            await fill(ends.buffer)

    async def settle(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        for tensor in memory.values():
            tensor.fill_(9)
        await ends.peer.lookup.peek([1])  # all that was said before is heard
        await ends.quiet()
        await until(lambda: all(e.state is EntryState.READY for e in entries.values()))
        assert outcome.cancelled or len(entries) == (verb in PUTS)
        if entries:
            check(await ends.buffer.drop_select([1]))
        await ends.emptied()
        assert all(bool((tensor == 9).all()) for tensor in memory.values())

    modes: tuple[CancelMode, ...] = ("task", "scope", "again")
    await sweep_cancellation(
        lambda: verb(ends, memory), settle, before=before, modes=modes
    )


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("verb", [*PUTS, *TAKES])
@pytest.mark.parametrize(
    "ends",
    ["link into a GPU", "GPU to host", "host to GPU", "cuda_ipc", "nccl"],
    indirect=True,
)
async def test_a_cancelled_verb_loses_nothing_and_leaves_the_callers_memory_alone(
    ends: Ends, verb: Verb
) -> None:
    """Those in host memory are swept by the lookup checks."""
    await sweep(ends, verb)


async def test_a_cancelled_put_of_a_layer_may_be_made_again(ends: Ends) -> None:
    memory = ends.at_peer()
    is_put, key = False, memory["key"]
    async with ends.peer.lookup.open_insert([1], None, LAYERS) as writer:

        async def before() -> None:
            key.copy_(CONTENT["key"])

        async def put() -> None:
            if not is_put:
                await writer.put("key", key)

        async def settle(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            nonlocal is_put
            key.fill_(9)
            is_put = not outcome.cancelled

        modes: tuple[CancelMode, ...] = ("task", "completion")
        await sweep_cancellation(put, settle, before=before, modes=modes)
        await writer.put("hidden", memory["hidden"])
    check(await ends.buffer.drop_select([1]))


async def test_what_has_landed_outlives_a_writer_that_fails(ends: Ends) -> None:
    with pytest.raises(LookupError):
        async with ends.buffer.open_insert([1], None, MORE_LAYERS) as writer:
            await writer.put("key", CONTENT["key"])
            reading = ends.peer.lookup.open_drop_select([1])
            stream = await reading.__aenter__()
            await stream.wait_for("key")
            raise LookupError
    with pytest.raises(EntryAborted, match="producer"):
        await stream.wait_for("value")
    assert is_same(await stream.wait_for("key"), CONTENT["key"])
    await until(lambda: not ends.buffer.statistics().mapped_by)
    # Though nobody has left it yet.
    await until(lambda: not ends.buffer.statistics().pinned_bytes)
    with pytest.raises(LeaseLost):
        await reading.__aexit__(None, None, None)
    await ends.emptied()


@pytest.mark.parametrize("route", [name for name in ROUTES if name != "nccl"])
async def test_a_link_lost_in_mid_stream_gives_the_entry_back(
    two_gpus: FakeGpus, route: str
) -> None:
    """Another GPU is connected some time after the link, and so not seen here."""
    async with opened(two_gpus, route) as ends:
        async with ends.buffer.open_insert([1], None, MORE_LAYERS) as writer:
            await writer.put("key", CONTENT["key"])
            with pytest.raises(PeerLost):
                async with ends.peer.lookup.open_drop_select([1]) as stream:
                    await stream.wait_for("key")
                    ends.peer._linked().abort()
                    await anext(stream)
                    await anext(stream)
            await writer.put("hidden", CONTENT["hidden"])
            await writer.put("value", noise(MIB, 2))
            async with ends.peer.lookup.open_drop_select([1]) as stream:
                assert is_same(await stream.wait_for("value"), noise(MIB, 2))
                found = {name: await stream.wait_for(name) for name in LAYERS}
                assert all(is_same(found[name], CONTENT[name]) for name in LAYERS)
                assert stream.attempt == 2
                del found
        await ends.emptied()


@pytest.mark.parametrize("nbytes", [0, 8, 16_384, 16_385, 65_537, 4 * MIB + 1])
@pytest.mark.parametrize("end", ["", "?payload=inline"])
async def test_values_come_back_as_they_were_put(nbytes: int, end: str) -> None:
    async with (
        StoreBuffer("16MiB") as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
        connect(server.url + end) as peer,
    ):
        await peer.store.put("a", noise(nbytes))
        assert is_same(await peer.store.get("a"), noise(nbytes))
        into = torch.zeros(nbytes, dtype=torch.uint8)
        assert await peer.store.get("a", into=into) is into
        assert is_same(into, noise(nbytes))


# A route that is lost midway: the verb goes on by the next one.


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("verb", [*PUTS, drop_select, drop_select_into, borrow])
async def test_a_verb_goes_on_when_its_route_is_lost(
    two_gpus: FakeGpus, verb: Verb, *, near: bool
) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        sender = pair.theirs if verb in PUTS else pair.ours
        sender.process.nccl.is_silent = True
        ends = Ends(pair.buffer, pair.peer, pair.ours, pair.theirs)
        moving = asyncio.create_task(use(ends, verb))
        receiver = pair.way if verb in PUTS else pair.near_way
        await until(lambda: receiver.transport.receiver.is_busy)
        await until_blocked(moving)
        assert pair.staged_bytes == (MIB if verb in PUTS else 0)
        (pair.near_way if near else pair.way)._stalled(PeerLost("nothing came"))
        await moving
        assert pair.peer.transport == "inline"
        await until(lambda: not pair.buffer.statistics().used_bytes)


@contextlib.contextmanager
def unreadable(route: str) -> Iterator[None]:
    """Let what a peer shows not be read where it lies, for once."""
    copy = CopyPool.copy

    async def fail(pool: CopyPool, *args: Any, **kwargs: Any) -> Any:
        patch.setattr(CopyPool, "copy", copy)
        raise GPUFailed("that memory cannot be read")

    def refuse(file: MappedFile) -> MappedFile:
        raise OSError(errno.ENOMEM, "no mapping more")

    with pytest.MonkeyPatch.context() as patch:
        if ROUTES[route] == "map":
            patch.setattr(MappedFile, "claim", lambda file, places: None)
            patch.setattr(MappedFile, "again", refuse)
        else:
            patch.setattr(CopyPool, "copy", fail)
        yield


@pytest.mark.parametrize("verb", [drop_select, drop_select_into, borrow_into])
@pytest.mark.parametrize("route", ["map", "map into a GPU", "cuda_ipc", "peer access"])
async def test_what_cannot_be_read_where_it_lies_comes_by_the_next_route(
    two_gpus: FakeGpus, route: str, verb: Verb
) -> None:
    async with opened(two_gpus, route) as ends:
        await fill(ends.buffer)
        with unreadable(route):
            await verb(ends, ends.at_peer())
        assert ends.buffer.statistics().given_back == 0
        await ends.emptied()


@pytest.mark.parametrize("verb", [drop_select, drop_select_into, borrow_into])
@pytest.mark.parametrize("ends", ["map"], indirect=True)
async def test_cancelled_as_it_comes_by_the_next_route_it_loses_nothing(
    ends: Ends, verb: Verb
) -> None:
    with unreadable("map"):
        await sweep(ends, verb)


async def test_who_loses_its_route_keeps_its_place_in_line(two_gpus: FakeGpus) -> None:
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        pair.ours.process.nccl.is_silent = True
        first = asyncio.create_task(pair.peer.lookup.drop_select([1]))
        await until(lambda: pair.buffer.statistics().waiting_selects == 1)
        second = asyncio.create_task(pair.buffer.drop_select([1]))
        await until(lambda: pair.buffer.statistics().waiting_selects == 2)
        await fill(pair.buffer)
        await until(lambda: pair.near_way.transport.receiver.is_busy)
        pair.near_way._stalled(PeerLost("nothing came"))
        entry = await first
        assert entry.attempt == 1
        check(entry)
        assert not second.done()
        await fill(pair.buffer)
        check(await second)

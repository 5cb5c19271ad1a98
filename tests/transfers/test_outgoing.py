"""What a server may say of parts that are to leave, and what a GPU may refuse."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.insert import RemoteSend
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.remote.store import begin_put
from asynckv.buffers.serve import serve
from asynckv.errors import GPUFailed, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Frame,
    Get,
    Put,
)
from asynckv.protocol.transfer import EAGER_NBYTES
from asynckv.protocol.transfer_frames import (
    Eager,
    Grant,
    RouteName,
    Sent,
)
from asynckv.protocol.wire import digest_of
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.host_copies import D2HCopier
from asynckv.transfers.outgoing import EagerParts, Outgoing
from asynckv.transfers.source import HostSource
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.cuda import FakeCuda
from harness.gpu_pairs import open_nccl_buffers
from harness.link_pairs import Hearer, LinkPair, ScriptedService, held_lanes, linked
from harness.raw_inserts import NoRoutes


class Asked:
    """One put from host memory, and the server that it was asked of."""

    def __init__(self, pair: LinkPair, routes: NoRoutes | None, nbytes: int) -> None:
        self.pair = pair
        self.value = noise(nbytes)
        self.sending: RemoteSend = begin_put(
            pair.near, "key", HostSource(self.value), routes
        )
        self.transfer = 0

    async def grant(self, *routes: RouteName) -> None:
        service = self.pair.service
        await until(lambda: bool(service.asked))
        stream, frame, _ = service.asked[0]
        assert isinstance(frame, Put)
        self.transfer = frame.transfer
        for route in routes:
            stream.send(Grant(frame.transfer, route))

    def said(self) -> list[Frame]:
        """What was sent of it by now."""
        return [frame for frame, _ in self.pair.service.hearers[0].frames]


@asynccontextmanager
async def asked(
    routes: NoRoutes | None, url: str = "mem://", nbytes: int = MIB
) -> AsyncIterator[Asked]:
    async with linked(url, lambda *_: None) as pair:
        one = Asked(pair, routes, nbytes)
        yield one
        await one.sending.quiesce()


@pytest.mark.parametrize(
    ("route", "routes", "why"),
    [
        ("nccl", None, "nothing leads to"),
        ("nccl", NoRoutes(), "nothing leads to"),
        ("cuda_ipc", None, "nothing leads to"),
        ("cuda_ipc", NoRoutes(), "second grant"),
    ],
    ids=["no nccl", "no way", "nothing shown", "nobody reads"],
)
async def test_a_grant_that_makes_no_sense_breaks_the_link(
    route: RouteName, routes: NoRoutes | None, why: str
) -> None:
    async with asked(routes) as one:
        await one.grant(route, route)
        await until(lambda: not one.pair.near.is_open)
        assert why in str(one.pair.near.error)


async def test_a_peer_without_a_gpu_shows_nothing() -> None:
    async with linked("tcp://127.0.0.1:0") as pair:
        routes = connect(pair.listener.url).routes
        assert routes.importer(pair.near) is None
        assert routes.sends_from(pair.near) == "cpu"


async def test_what_is_not_where_the_peer_reads_waits_for_another_grant() -> None:
    async with asked(NoRoutes()) as one:
        await one.grant("cuda_ipc")
        hearer = one.pair.service.hearers[0]
        said = Sent(one.transfer, 0, b"", "off", "cuda_ipc")
        assert await hearer.next() == (said, b"") and one.sending.may_be_in
        one.pair.service.asked[0][0].send(Accepted())
        assert await one.sending.accepted()


async def test_what_is_queued_is_not_granted_again_and_does_not_leave() -> None:
    async with asked(None, "tcp://127.0.0.1:0") as one:
        leaving = one.pair.near.payload._leaving  # type: ignore[attr-defined]
        with held_lanes("send"):
            await one.grant("link")
            await until(lambda: bool(leaving))
            await one.grant("link")
            await until(lambda: not one.pair.near.is_open)
        await until(lambda: not leaving)
        assert "still leaving" in str(one.pair.near.error) and not one.said()


async def test_what_is_to_ride_is_not_granted_again_and_rides_once() -> None:
    async with asked(None, nbytes=8 * 1024) as one:
        grant = Grant(one.sending._transfer)
        one.sending.on_frame(grant, b"")
        with pytest.raises(RemoteProtocolError, match="still leaving"):
            one.sending.on_frame(grant, b"")
        await until(lambda: bool(one.pair.service.hearers))
        one.sending.cancel()
        await until(lambda: Cancel() in one.said())
        assert [type(frame) for frame in one.said()] == [Eager, Cancel]


async def test_a_grant_that_crosses_the_cancellation_is_no_matter() -> None:
    async with asked(NoRoutes()) as one:
        one.sending.cancel()
        await one.grant("nccl", "cuda_ipc", "link")
        await until(lambda: one.sending.may_be_in)
        assert one.pair.near.is_open


@asynccontextmanager
async def to_host_memory(gpus: FakeGpus) -> AsyncIterator[tuple[LookupBuffer, Peer]]:
    """A lookup buffer in host memory, and a peer on a GPU."""
    there = fake_device_of(gpus.process(), 1).device
    async with (
        LookupBuffer("4MiB", drain_s=0) as lookup,
        serve("tcp://127.0.0.1:0", lookup=lookup) as server,
        connect(server.url, device=there, max_bytes="4MiB") as peer,
    ):
        yield lookup, peer


def on_gpu_of(peer: Peer, tensor: torch.Tensor) -> torch.Tensor:
    assert peer.on_gpu is not None and peer.on_gpu.device_pages is not None
    tensors = peer.on_gpu.device_pages.allocation.gpus.tensors
    found: torch.Tensor = tensors.on_gpu(tensor, 1)  # type: ignore[attr-defined]
    return found


async def test_a_cancelled_insert_is_copied_from_its_gpu_no_further(
    two_gpus: FakeGpus,
) -> None:
    async with to_host_memory(two_gpus) as (lookup, peer):
        key = on_gpu_of(peer, noise(MIB))

        async def check(k: int, mode: CancelMode, outcome: Outcome[str]) -> None:
            await peer.lookup.peek([1])
            entries = lookup.ledger.table.entries
            await until(lambda: all(e.complete for e in entries.values()))
            assert entries or outcome.cancelled
            if entries:
                entry = await lookup.drop_select([1])
                assert is_same(entry.key, noise(MIB))  # type: ignore[arg-type]
                del entry
            await until(lambda: not lookup.statistics().used_bytes)
            assert peer.on_gpu is not None and not peer.on_gpu.arena.used_bytes

        insert = peer.lookup.insert
        await sweep_cancellation(lambda: insert([1], None, key, None, None), check)


async def test_an_insert_that_is_cancelled_twice_waits_for_what_reads_its_gpu(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, returns, copy = threading.Event(), threading.Event(), FakeCuda.copy

    def held(cuda: FakeCuda, *args: Any) -> None:
        is_reading.set()
        returns.wait(60)
        copy(cuda, *args)

    async with to_host_memory(two_gpus) as (lookup, peer):
        key = on_gpu_of(peer, noise(MIB))
        monkeypatch.setattr(FakeCuda, "copy", held)
        task = asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
        await until(is_reading.is_set)
        for _ in range(2):
            task.cancel()
            await until_blocked(task)
        is_early = task.done()
        returns.set()
        await asyncio.wait({task})
        assert task.cancelled() and not is_early
        await until(lambda: not lookup.statistics().used_bytes)


@pytest.mark.parametrize("part", ["copy", "_digest_sent"])
async def test_what_this_sides_gpu_refuses_is_raised(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    async def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    is_copied = part == "copy"
    monkeypatch.setattr(D2HCopier if is_copied else Outgoing, part, fail)
    if is_copied:
        async with to_host_memory(two_gpus) as (_, peer):
            key = on_gpu_of(peer, noise(MIB))
            with pytest.raises(GPUFailed, match="off the bus"):
                await peer.lookup.insert([1], None, key, None, None)
        return
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        key = pair.theirs.tensor(noise(MIB))
        with pytest.raises(GPUFailed, match="off the bus"):
            await pair.peer.lookup.insert([1], None, key, None, None)
        await until(lambda: not pair.staged_bytes)
        await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_an_entry_that_is_accepted_early_is_not_digested_any_more(
    two_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    digesting = list[asyncio.Task[None] | None]()

    async def wait(*anything: object) -> list[bytes]:
        del anything  # the task's error would keep it
        digesting.append(asyncio.current_task())
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    on_frame = RemoteSend.on_frame
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        monkeypatch.setattr(pair.peer.pool, "digest", wait)
        sendings = list[RemoteSend]()

        def note(sending: RemoteSend, frame: Frame, body: bytes) -> None:
            sendings.append(sending)
            on_frame(sending, frame, body)

        monkeypatch.setattr(RemoteSend, "on_frame", note)
        key = pair.theirs.tensor(noise(MIB))
        inserting = asyncio.create_task(
            pair.peer.lookup.insert([1], None, key, None, None)
        )
        await until(lambda: bool(digesting))
        sendings[0].on_frame(Accepted(), b"")
        await inserting
        assert digesting[0] is not None and digesting[0].done()
        await until(lambda: not pair.staged_bytes)


KIB = 1024


class EagerEnds(NamedTuple):
    """A link whose near side has opened a stream, and what it sends on that."""

    near: Link
    stream: LinkStream
    riding: EagerParts
    service: ScriptedService

    def riders(self) -> list[tuple[Eager, bytes]]:
        (hearer,) = self.service.hearers
        return [(frame, b) for frame, b in hearer.frames if isinstance(frame, Eager)]

    async def heard(self, count: int) -> list[tuple[Eager, bytes]]:
        await until(lambda: sum(len(f.parts) for f, _ in self.riders()) >= count)
        return self.riders()


@pytest.fixture(params=["full", "off"])
async def eager_ends(request: pytest.FixtureRequest) -> AsyncIterator[EagerEnds]:
    digest = {"digest": request.param}
    async with linked("tcp://127.0.0.1:0", lambda *_: None, near=digest) as pair:
        stream = pair.near.open_stream(Hearer(), Get("k"))
        await until(lambda: bool(pair.service.asked))
        riding = EagerParts(pair.near, stream, 5)
        yield EagerEnds(pair.near, stream, riding, pair.service)


def part(index: int, nbytes: int) -> memoryview:
    return memoryview(bytes([index % 251]) * nbytes)


def add(
    eager_ends: EagerEnds, index: int, nbytes: int, digest: bytes | None = None
) -> None:
    eager_ends.riding.add(index, nbytes, partial(part, index, nbytes), digest)


async def test_what_rides_is_a_matter_of_size_alone(eager_ends: EagerEnds) -> None:
    failed = list[Exception]()
    sending = Outgoing(eager_ends.stream, 7, failed=failed.append)
    for index, nbytes in enumerate((EAGER_NBYTES + 1, EAGER_NBYTES, 0)):
        sending.add(index, HostSource(noise(nbytes)))
    sending.on_grant(Grant(7))
    ((frame, body),) = await eager_ends.heard(2)
    assert frame.parts == (1, 2) and len(body) == EAGER_NBYTES and not failed
    await sending.quiesce()


async def test_as_many_ride_together_as_fit_in_a_frame_s_body(
    eager_ends: EagerEnds,
) -> None:
    sizes = [4 * KIB] * 16 + [16 * KIB] * 3 + [15 * KIB, 2 * KIB, 0]
    for index, nbytes in enumerate(sizes):
        add(eager_ends, index, nbytes)
    heard = await eager_ends.heard(len(sizes))
    assert [len(frame.parts) for frame, _ in heard] == [16, 4, 2]
    assert [p for frame, _ in heard for p in frame.parts] == [*range(22)]
    assert b"".join(body for _, body in heard) == b"".join(
        part(index, nbytes) for index, nbytes in enumerate(sizes)
    )
    assert {frame.transfer for frame, _ in heard} == {5}


async def test_each_has_its_digest_unless_the_link_carries_none(
    eager_ends: EagerEnds,
) -> None:
    add(eager_ends, 3, 100)
    add(eager_ends, 4, 100, b"known already")
    ((frame, _),) = await eager_ends.heard(2)
    digests = (digest_of(part(3, 100)), b"known already")
    assert frame.digests == (digests if eager_ends.near.digest == "full" else ())


async def test_those_without_bytes_are_too_many_for_a_frame_as_well(
    eager_ends: EagerEnds,
) -> None:
    for index in range(1025):
        add(eager_ends, index, 0)
    heard = await eager_ends.heard(1025)
    assert [len(frame.parts) for frame, _ in heard] == [1024, 1]


async def test_memory_is_read_a_little_in_each_tick_and_never_after_the_stop(
    eager_ends: EagerEnds,
) -> None:
    read = list[int]()

    def note(index: int) -> memoryview:
        read.append(index)
        return part(index, EAGER_NBYTES)

    for index in range(1000):
        eager_ends.riding.add(index, EAGER_NBYTES, partial(note, index))
    assert not read
    await asyncio.sleep(0)
    assert 0 < len(read) <= 20
    eager_ends.riding.stop()
    count = len(read)
    await eager_ends.heard(count)
    add(eager_ends, 1000, 10)
    await eager_ends.heard(count + 1)
    assert len(read) == count


async def test_a_slow_reader_makes_nobody_hold_more_than_a_little(
    eager_ends: EagerEnds,
) -> None:
    most = 0
    for index in range(1000):
        add(eager_ends, index, EAGER_NBYTES)
    while sum(len(frame.parts) for frame, _ in eager_ends.riders()) < 1000:
        most = max(most, eager_ends.near.outgoing_bytes)
        await asyncio.sleep(0)
    assert 0 < most < 2 * 2**20


async def test_while_much_is_unwritten_they_wait(
    eager_ends: EagerEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = list[Callable[[], None]]()
    with monkeypatch.context() as patch:
        patch.setattr(type(eager_ends.near), "outgoing_bytes", 5 * 2**20)
        patch.setattr(eager_ends.near, "call_when_drained", waiting.append)
        for index in range(100):
            add(eager_ends, index, EAGER_NBYTES)
        await until(lambda: bool(waiting))
    (go_on,) = waiting
    heard = sum(len(frame.parts) for frame, _ in eager_ends.riders())
    assert heard < 100
    go_on()
    assert sum(len(frame.parts) for frame, _ in await eager_ends.heard(100)) == 100

"""Two sides that do everything there is to do, through a proxy that listens in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable
from typing import Any, Final
from urllib.parse import urlsplit

import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import AsyncKVError, EntryTooLarge
from asynckv.links.dial import dial
from asynckv.links.link import LinkStream
from asynckv.links.listen import listen
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.pipes.group import join_group
from asynckv.pipes.pipe import Pipe
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import (
    Attach,
    Commit,
    Insert,
    OpeningFrame,
    Push,
    Retract,
    Select,
    Settle,
)
from asynckv.protocol.session import Session
from asynckv.protocol.transfer_frames import (
    Exposed,
    Grant,
    OpenDevices,
    OpenMemory,
    Proved,
    Sent,
)
from asynckv.protocol.values import Limits, Place
from asynckv.security.keyring import Keyring
from asynckv.security.shared_secret import Secret
from asynckv.sharing.gpu_channel import DeviceStream
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import expect
from asynckv.testing.faults.hostile import RawConnection
from asynckv.testing.pairs import free_port
from asynckv.transports.nccl.directions import NcclSettings
from asynckv.transports.nccl.transport import NcclTransport
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus
from harness.fuzzing.recording import Recording, Segment, Tap, heard
from harness.link_pairs import ScriptedService, name_of
from harness.nccl_pairs import NcclPair

__all__ = (
    "SCENES",
    "record",
    "record_gpus",
)


_LOOKUP_BYTES: Final = 200_000
_LARGE: Final = 70_000
_LONG: Final = 9_000
"""Tokens whose bytes do not fit in one wire frame."""


def _tensor(nbytes: int, salt: int = 0) -> torch.Tensor:
    return (torch.arange(nbytes) * 7 + salt).to(torch.int8)


async def record() -> Recording:
    """Let all scenes play, one after the other, and return what was said."""
    return Recording.joined([await scene() for scene in SCENES])


# Buffers.


async def _record_buffers() -> Recording:
    """Inserts, selects, leases, streams, puts and gets, of one server."""
    async with (
        LookupBuffer(_LOOKUP_BYTES, drain_s=0) as lookup,
        StoreBuffer(2**20) as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
    ):
        return await heard(server.url, _use_buffers)


async def _use_buffers(url: str, tap: Tap) -> None:
    async with (
        connect(url, lanes=1) as producer,
        connect(url, lanes=1) as consumer,
    ):
        await _take_and_hold(producer, consumer)
        await _fail_and_cancel(producer, consumer)
        await _stream(producer, consumer)
        await _wait_for_room(producer, consumer)
        await _store_and_get(producer, consumer)


async def _take_and_hold(producer: Peer, consumer: Peer) -> None:
    lookup, tensor = producer.lookup, _tensor(64).view(4, 16)
    await lookup.insert([1, 2, 3], [1, 1, 0], tensor, tensor.float(), None)
    await consumer.lookup.peek([1, 2])
    await consumer.lookup.drop_select([1, 2])
    await lookup.insert([1, 2], None, {"layers.0": tensor}, None, tensor)
    with contextlib.suppress(KeyError):
        async with consumer.lookup.drop_select([1]):
            raise KeyError  # it is given back
    async with consumer.lookup.drop_select([1]):
        pass
    large = _tensor(_LARGE)
    await lookup.insert([7], None, large, None, None, extras={"x": large + 1})
    await consumer.lookup.drop_select([7])
    await lookup.insert([8], None, large, tensor, None)
    await consumer.lookup.drop_select([8])
    await lookup.insert(range(_LONG), None, tensor, None, None, entry_id="long")
    await consumer.lookup.drop_select(range(_LONG))
    await lookup.taken("long")


async def _fail_and_cancel(producer: Peer, consumer: Peer) -> None:
    with contextlib.suppress(EntryTooLarge):
        await producer.lookup.insert(None, None, _tensor(_LOOKUP_BYTES + 1), None, None)
    waiting = asyncio.create_task(_awaited(consumer.lookup.drop_select([99])))
    await until_blocked(waiting)
    await consumer.lookup.peek([99])  # the query has arrived before
    waiting.cancel()
    await asyncio.wait({waiting})
    await producer.lookup.insert([5], None, _tensor(8), None, None, entry_id="out")
    await producer.lookup.withdraw("out")


async def _awaited(coroutine: Awaitable[Any]) -> Any:
    return await coroutine


async def _stream(producer: Peer, consumer: Peer) -> None:
    specs = {"key": TensorSpec((_LARGE,), "int8"), "value": TensorSpec((9,), "int8")}

    async def read() -> None:
        async with consumer.lookup.open_drop_select([3, 1]) as stream:
            async for _ in stream:
                pass

    reading = asyncio.create_task(read())
    async with producer.lookup.open_insert([3, 1], None, specs) as writer:
        await writer.put("value", _tensor(9))
        await writer.put("key", _tensor(_LARGE))
    await reading


async def _wait_for_room(producer: Peer, consumer: Peer) -> None:
    await producer.lookup.insert([50], None, _tensor(120_000), None, None)
    inserting = asyncio.create_task(
        _awaited(producer.lookup.insert([51], None, _tensor(100_000), None, None))
    )
    await until_blocked(inserting)
    await producer.lookup.peek([51])
    async with consumer.lookup.drop_select([50]):
        pass
    await inserting
    await consumer.lookup.drop_select([51])


async def _store_and_get(producer: Peer, consumer: Peer) -> None:
    for key, nbytes in (("small", 10), ("large", _LARGE)):
        await producer.store.put(key, _tensor(nbytes))
        await consumer.store.get(key)
    await consumer.store.get("missing")
    await consumer.store.contains(["small", "missing"])
    await consumer.store.stat("small")
    async with consumer.store.pin(["small", "missing"]):
        await consumer.store.get("small")
    await producer.store.delete("small")
    await producer.store.clear()


# Pipes.


async def _record_pipe() -> Recording:
    """Tensors both ways, with their bytes and without."""
    async with listen_pipe("tcp://127.0.0.1:0", lanes=1) as listener:

        async def play(url: str, tap: Tap) -> None:
            async with open_pipe(url, lanes=1) as near, await listener.accept() as far:
                for one, other in ((near, far), (far, near)):
                    await _carry(one, other)

        return await heard(listener.url, play)


async def _carry(one: Pipe, other: Pipe) -> None:
    for tensor in (None, _tensor(33), _tensor(_LARGE)):
        await one.send_tensor(tensor)
        await other.recv_tensor()
    await one.flush()


async def _record_group() -> Recording:
    """Three ranks: who is missing, who is there, and a barrier."""
    port = free_port()

    async def rank(number: int, port: int) -> None:
        async with join_group(
            rank=number, size=3, host="127.0.0.1", port=port, timeout_s=10
        ) as group:
            await group.barrier()

    async def play(url: str, tap: Tap) -> None:
        seen = urlsplit(url).port or 0
        first = [asyncio.create_task(rank(n, p)) for n, p in ((0, port), (1, seen))]
        await until(lambda: b"missing" in _said(tap))
        await asyncio.gather(*first, rank(2, seen))

    return await heard(f"tcp://127.0.0.1:{port}", play)


def _said(tap: Tap) -> bytes:
    return b"".join(segment.data for segment in tap.recording.segments)


# Links.


async def _record_refusals() -> Recording:
    """A peer with another model, and a lane of no link."""
    async with (
        LookupBuffer(_LOOKUP_BYTES, fingerprint="one") as lookup,
        serve("tcp://127.0.0.1:0", lookup=lookup) as server,
    ):

        async def play(url: str, tap: Tap) -> None:
            with contextlib.suppress(AsyncKVError):
                async with connect(url, fingerprint="other"):
                    pass
            with await RawConnection.dial(url) as lane:
                await lane.send(encode_frame(0, Attach(b"no such link", 0))[0])
                await lane.receive(2**16)

        return await heard(server.url, play)


async def _record_heartbeats() -> Recording:
    """A link of two that share a secret, on which nothing happens for a while."""
    limits = Limits(heartbeat_ms=20)
    keyring = Keyring(secrets=(Secret(b"known to both sides" * 2),))
    listener = await listen(
        "tcp://127.0.0.1:0",
        identity=name_of("far"),
        service_for=lambda link: ScriptedService(),
        limits=limits,
        keyring=keyring,
    )

    async def play(url: str, tap: Tap) -> None:
        link = await dial(
            url, identity=name_of("near"), limits=limits, lanes=1, keyring=keyring
        )
        await until(lambda: _said(tap).count(b"pong") >= 2)
        await link.aclose()

    try:
        return await heard(listener.url, play)
    finally:
        await listener.aclose()


# What is hard to provoke.


async def _record_made_up() -> Recording:
    """What a link says only when it was cut at a bad moment, or without a proxy."""
    near: Session[str] = Session(Limits(), dialled=True)
    far: Session[str] = Session(Limits(), dialled=False)
    segments: list[Segment] = []

    def pass_on(one: Session[str], other: Session[str]) -> None:
        data = one.outbox.take(2**20)
        segments.append(Segment(0, one is near, data))
        list(other.receive(data))

    near.open("settle", Settle("e", b"token"))
    select = near.open("select", Select(has_key=False))
    insert = near.open("insert", Insert("e", 1, False, streaming=True))
    near.send(insert, Commit())
    mapping = near.open("map", OpenMemory("lookup"))
    sharing = near.open("share", OpenMemory("pipe", "0" * 32))
    near.open("show", OpenMemory("inserts", "0" * 32))
    pass_on(near, far)
    far.send(select, Retract(2))
    far.send(mapping, Exposed(f"asynckv-{0:032}", b"t" * 16, 2**20))
    far.send(sharing, Exposed(f"asynckv-{1:032}", b"t" * 16, 2**20 + 512, b"h" * 64))
    pass_on(far, near)
    near.send(mapping, Proved(b"n" * 16))
    near.send(sharing, Proved(b"n" * 16))
    near.send(select, Grant(2, "nccl", "edges"))
    spec, place = TensorSpec((4,), "uint8"), Place(((4096, 8192),), 64, 1)
    near.send(select, Push(3, spec=spec, digest=b"d" * 16, place=place))
    pass_on(near, far)
    far.send(select, Sent(2, 0, b"d" * 16, "edges", "nccl"))
    far.send(insert, Grant(1, "cuda_ipc", "edges"))
    pass_on(far, near)
    near.send(insert, Sent(1, 0, b"d" * 16, "edges", "cuda_ipc", 4096))
    pass_on(near, far)
    return Recording(tuple(segments))


# Between GPUs.


_SETTINGS: Final = NcclSettings(chunk_bytes=4096, max_operations=2)
_CONTENT: Final = bytes(range(250)) * 40


async def record_gpus() -> Recording:
    """Both ways; not wanted; aborted; to the end."""
    pair = NcclPair(FakeGpus(2), _no_loss, _no_loss, settings=_SETTINGS)
    service = _Accepting(pair.far)
    try:
        listener = await listen(
            "tcp://127.0.0.1:0",
            identity=name_of("far"),
            service_for=lambda link: service,
        )
        try:
            return await heard(listener.url, _Using(pair, service).play)
        finally:
            await listener.aclose()
    finally:
        await pair.aclose()


class _Accepting:
    """Opens its transport for whoever asks."""

    def __init__(self, transport: NcclTransport) -> None:
        self.opening: asyncio.Task[None]
        self._transport = transport

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> DeviceStream:
        if not isinstance(frame, OpenDevices):
            raise ValueError(f"asked for something else: {frame}")
        channel = DeviceStream.answer(stream)
        channel.describe(self._transport.describe())
        opening = self._transport.open(frame.description, channel)
        self.opening = asyncio.create_task(opening)
        return channel


@dataclasses.dataclass(frozen=True)
class _Using:
    """Does with a pair what there is to do."""

    pair: NcclPair
    accepting: _Accepting

    async def play(self, url: str, tap: Tap) -> None:
        near, far = self.pair.near, self.pair.far
        link = await dial(url, identity=name_of("near"), lanes=1)
        try:
            channel = DeviceStream(answers=False)
            channel.ask(link, near.describe())
            await near.open(await channel.description(), channel)
            await self.accepting.opening
            await self._move(0, 1)
            await self._move(1, 2)
            await self._offer_what_nobody_wants()
            await self._abort()
            await near.aclose()
            await far.aclose()
        finally:
            await link.aclose()

    async def _offer_what_nobody_wants(self) -> None:
        """And take back what the other side may have refused already."""
        near, far = self.pair.near, self.pair.far
        far.announce(5)
        near.send(5, 0, self.pair.memory(0, _CONTENT), _ignore)
        near.stop(5)
        await near.quiesce(5)

    async def _abort(self) -> None:
        """One side posts what the other never does: both let go of it."""
        near, far = self.pair.near, self.pair.far
        peers_nccl = self.pair.processes[0].nccl
        peers_nccl.is_silent = True
        source, target = self._memory(0)
        far.receive(7, 0, target, _ignore)
        near.send(7, 0, source, _ignore)
        await until(lambda: far.receiver.nbytes > 0)
        await far.quiesce(7)
        peers_nccl.is_silent = False

    def _memory(self, side: int) -> tuple[DeviceMemory, DeviceMemory]:
        """Of one side's GPU what is sent, and of the other's where it lands."""
        source = self.pair.memory(side, _CONTENT)
        return source, self.pair.memory(1 - side, bytes(len(_CONTENT)))

    async def _move(self, side: int, transfer: int) -> None:
        ends = (self.pair.near, self.pair.far)
        source, target = self._memory(side)
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                landed.set_result(None)
            else:
                landed.set_exception(error)

        ends[1 - side].receive(transfer, 0, target, tell)
        ends[side].send(transfer, 0, source, _ignore)
        await landed
        is_same = self.pair.content(1 - side, target) == _CONTENT
        expect(is_same, "other bytes landed")


def _ignore(digest: bytes, error: BaseException | None) -> None:
    """Whoever is told does not care."""


def _no_loss(error: Exception) -> None:
    """The end of the link is no surprise here."""


SCENES: Final = (
    _record_buffers,
    _record_pipe,
    _record_group,
    _record_refusals,
    _record_heartbeats,
    record_gpus,
    _record_made_up,
)

"""Two sides that do everything there is to do, through a proxy that listens in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, Final
from urllib.parse import urlsplit

import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import AsyncKVError, EntryTooLarge
from asynckv.links.dial import dial
from asynckv.links.listen import listen
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.pipes.group import join_group
from asynckv.pipes.pipe import Pipe
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import (
    Attach,
    Commit,
    Insert,
    Push,
    Retract,
    Select,
    Settle,
)
from asynckv.protocol.session import Session
from asynckv.protocol.transfer_frames import (
    Exposed,
    Grant,
    OpenMemory,
    Proved,
    Sent,
)
from asynckv.protocol.values import Limits, Place
from asynckv.security.keyring import Keyring
from asynckv.security.shared_secret import Secret
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.faults.hostile import RawConnection
from asynckv.testing.pairs import free_port
from asynckv.types import TensorSpec
from harness.fuzzing.gpu_scene import record_gpus
from harness.fuzzing.recording import Recording, Segment, Tap, heard
from harness.link_pairs import ScriptedService, name_of

__all__ = ("SCENES", "record")

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


SCENES: Final = (
    _record_buffers,
    _record_pipe,
    _record_group,
    _record_refusals,
    _record_heartbeats,
    record_gpus,
    _record_made_up,
)

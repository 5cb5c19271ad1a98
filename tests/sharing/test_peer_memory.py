"""What a peer may say of its memory, and reads of it that nobody waits for any more."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import GPUFailed, PeerLost, RemoteProtocolError
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.protocol.frames import Push
from asynckv.protocol.values import Place
from asynckv.sharing.imports import PeerMemory
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.pipe_checks import LARGE, PIPE_BYTES
from asynckv.types import TensorSpec
from harness.fake_gpus import FakeGpus
from harness.ipc_pipe_pairs import IpcPipes, open_ipc_pipes

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

SPEC = TensorSpec((LARGE,), "uint8")
TARGET = DeviceMemory(4096, LARGE, 0)


@pytest.fixture
async def pair(two_gpus: FakeGpus) -> AsyncIterator[IpcPipes]:
    async with open_ipc_pipes(two_gpus) as pair:
        yield pair


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
    pair: IpcPipes, offset: int, what: str
) -> None:
    place = Place(((offset, LARGE),), 0, 1)
    with pytest.raises(RemoteProtocolError, match=what):
        pair.far._inbound.on_push(Push(99, spec=SPEC, place=place), b"")


@pytest.mark.parametrize(
    ("spec", "body"), [(TensorSpec((8,), "uint8"), b""), (SPEC, b"-")]
)
async def test_what_is_shared_is_large_and_does_not_ride(
    pair: IpcPipes, spec: TensorSpec, body: bytes
) -> None:
    push = Push(99, spec=spec, place=Place(((0, spec.nbytes),), 0, 1))
    with pytest.raises(RemoteProtocolError, match="came along|declared size"):
        pair.far._inbound.on_push(push, body)

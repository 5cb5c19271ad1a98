from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.gpu_sending import GpuSending
from asynckv.protocol.device_frames import GrantDevices
from asynckv.protocol.frames import Get
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.gpu_stores import GpuStores, open_gpu_stores
from asynckv.testing.link_pairs import Hearer
from asynckv.testing.lookup_checks.values import MIB, noise


def no_digest(*anything: object) -> asyncio.Task[None]:
    raise AssertionError(anything)


@pytest.fixture
async def apart(two_gpus: FakeGpus) -> AsyncIterator[GpuStores]:
    async with open_gpu_stores(two_gpus, theirs=1, digest="full") as pair:
        yield pair


async def test_of_what_was_not_sent_the_peer_hears_nothing(apart: GpuStores) -> None:
    await apart.store.put("key", noise(MIB))
    pinned, (services,) = apart.store.lookup("key", None), apart.server._services
    way = services.devices.way
    assert pinned is not None and way is not None and services.store is not None
    link, errors = apart.peer._linked(), list[BaseException | None]()
    stream = link.open_stream(Hearer(), Get("nothing"))
    way.transport.abort()
    sending = GpuSending(way, stream, GrantDevices(1, "full"), no_digest)
    sending.send(0, pinned.region, pinned.spec, pinned.digest)
    way.transport.send(
        3, 0, memoryview(b"after it"), lambda _, error: errors.append(error)
    )
    await until(lambda: bool(errors))
    assert errors[0] is not None and link.is_open
    sending.stop()
    apart.store.release(pinned)


async def test_a_value_without_a_digest_is_digested_for_its_peer(
    apart: GpuStores,
) -> None:
    await apart.store.put("key", noise(MIB))
    pinned = apart.store.lookup("key", None)
    assert pinned is not None
    pinned._value.digest = b""
    assert is_same(await apart.peer.store.get("key"), noise(MIB))
    apart.store.release(pinned)
    assert apart.has_moved

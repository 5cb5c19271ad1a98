from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.links.dial import dial
from asynckv.links.link import Link
from asynckv.protocol.frames import Accepted, Cancel, Cancelled, Failure, Put
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.types import TensorSpec
from harness.link_pairs import Hearer, name_of

SPEC = TensorSpec((MIB,), "uint8")
BYTES = bytes_of(noise(MIB))


@pytest.fixture
async def store() -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("4MiB") as store:
        yield store


@pytest.fixture
async def link(store: StoreBuffer) -> AsyncIterator[Link]:
    async with serve("mem://", store=store) as server:
        link = await dial(server.url, identity=name_of("peer"))
        yield link
        await link.aclose()


@pytest.mark.parametrize("is_right", [True, False])
async def test_bytes_are_compared_before_they_are_stored(
    store: StoreBuffer, link: Link, *, is_right: bool
) -> None:
    hearer, transfer = Hearer(), link.new_transfer()
    stream = link.open_stream(hearer, Put("key", transfer, inline=False, spec=SPEC))
    assert await hearer.next() == (Grant(transfer), b"")
    link.payload.send(transfer, 0, BYTES, lambda *_: None)
    stream.send(Sent(transfer, 0, digest_of(BYTES) if is_right else b"x" * 16))
    last, _ = await hearer.next()
    assert isinstance(last, Accepted if is_right else Failure)
    value = await store.get("key")
    assert is_same(value, noise(MIB)) if is_right else value is None


async def test_a_put_that_is_given_up_leaves_nothing(
    store: StoreBuffer, link: Link
) -> None:
    hearer, transfer = Hearer(), link.new_transfer()
    stream = link.open_stream(hearer, Put("key", transfer, inline=False, spec=SPEC))
    assert await hearer.next() == (Grant(transfer), b"")
    stream.send(Cancel())
    assert await hearer.next() == (Cancelled(), b"")
    assert not store.statistics().used_bytes


@pytest.mark.usefixtures("no_slabs")
async def test_a_put_for_which_there_is_no_memory_is_refused_alone() -> None:
    async with StoreBuffer(2**49) as store, serve("mem://", store=store) as server:
        link = await dial(server.url, identity=name_of("peer"))
        for nbytes in (2**48, 0):
            hearer, spec = Hearer(), TensorSpec((nbytes,), "uint8")
            put = Put("key", link.new_transfer(), inline=not nbytes, spec=spec)
            link.open_stream(hearer, put)
            last, _ = await hearer.next()
            assert getattr(last, "code", "") == ("EntryTooLarge" if nbytes else "")
        assert link.is_open and not store.statistics().used_bytes
        await link.aclose()

"""Frames that cross each other on a link: nobody has erred, and nothing ends by it."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest
import torch

from asynckv import LookupBuffer, TensorSpec
from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Accepted,
    Commit,
    Failure,
    Offer,
    Push,
    Reached,
    Retract,
    Select,
    Took,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.testing import until
from harness.link_pairs import Hearer
from harness.raw_inserts import RawInsert
from harness.raw_maps import RawMapper

MIB = 2**20


async def test_a_grant_of_a_retracted_offer_leaves_the_mapped_one_after_it_alone(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await mapper.map()
    room = local.statistics().max_bytes
    filler = await local.insert([9], None, torch.empty(room - 64).byte(), None, None)
    hearer, key = Hearer(), struct.pack("<q", 1)
    stream = mapper.link.open_stream(hearer, Select(has_key=True), key)
    with pytest.raises(LookupError):
        async with local.open_insert([1], None, {"key": TensorSpec((MIB,), "uint8")}):
            first, _ = await hearer.next()
            raise LookupError
    assert isinstance(first, Offer) and first.mapped is None
    assert await hearer.next() == (Retract(first.transfer), b"")
    await local.withdraw(filler)
    await local.insert([1], None, torch.ones(MIB), None, None)
    second, _ = await hearer.next()
    assert isinstance(second, Offer) and second.mapped is not None
    stream.send(Grant(first.transfer))
    stream.send(Took(second.token))
    await until(lambda: local.statistics().acknowledged == 1)
    assert mapper.link.is_open


async def test_a_tensor_that_is_not_needed_any_more_may_be_pushed_again(
    local: LookupBuffer, link: Link
) -> None:
    raw = RawInsert(link, MIB, MIB, streaming=True)
    await raw.granted()
    async with local.open_drop_select() as stream:
        first = await raw.push(0)
        data = memoryview(bytes(MIB))
        link.payload.send(first, 0, data, lambda *_: None)
        raw.stream.send(Sent(first, 0, digest_of(data)))
        await stream.wait_for("0.key")
    for _ in range(2):
        raw.stream.send(Push(again := link.new_transfer(), 1, inline=False))
        while (await raw.hearer.next())[0] != Retract(again):
            pass
    raw.stream.send(Commit())
    assert await raw.last() == Accepted()


async def lose(local: LookupBuffer, entry_id: str) -> None:
    """Let an entry fail in another consumer as often as it may."""
    for _ in range(2):
        with contextlib.suppress(LookupError):
            async with local.drop_select(entry_id=entry_id):
                raise LookupError


@pytest.mark.parametrize("frame", [Took, Reached])
async def test_what_is_offered_as_the_peer_has_ended_is_anothers(
    local: LookupBuffer, mapper: RawMapper, frame: type[Took | Reached]
) -> None:
    await mapper.map()
    small = await local.insert([1], None, torch.ones(8), None, None, deliveries=2)
    hearer, stream, first, _ = await mapper.select()
    large = await local.insert([1], None, torch.ones(MIB), None, None)
    await lose(local, small)
    assert await hearer.next() == (Retract(first.transfer), b"")
    assert (await hearer.next_of(Offer))[0].mapped is not None
    stream.send(frame(first.token))
    entry = await asyncio.wait_for(local.drop_select(entry_id=large), 10)
    assert entry.entry_id == large
    if frame is Took:
        await until(lambda: not local.statistics().mapped_by)
    else:
        assert isinstance((await hearer.next())[0], Failure)

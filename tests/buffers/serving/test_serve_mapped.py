from __future__ import annotations

import struct

import msgspec
import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import EntryTooLarge
from asynckv.protocol.frames import (
    Failure,
    Nack,
    Select,
)
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.values import Place
from asynckv.sharing import exporter
from asynckv.tensors.arena import Region
from asynckv.tensors.shared_file import edges_of
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until
from harness.link_pairs import Hearer
from harness.raw_maps import RawMapper

MIB = 2**20
LARGE = torch.full((MIB // 4,), 3.0)


async def test_an_offer_says_where_the_tensors_lie(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await local.insert([1], None, LARGE, None, None)
    file = await mapper.map()
    _, _, offer, body = await mapper.select()
    assert offer.mapped is not None
    (place,) = msgspec.msgpack.decode(body[-offer.mapped.nbytes :], type=list[Place])
    first = file.pieces(place, MIB)[0][:4].tobytes()
    assert struct.unpack("f", first) == (3.0,)
    assert offer.mapped.edges == edges_of(file.memory, [place], [MIB])


async def test_small_entries_ride_with_their_offer_as_ever(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await local.insert([1], None, torch.ones(100), None, None)
    await mapper.map()
    _, _, offer, _ = await mapper.select()
    assert offer.inline and offer.mapped is None


async def test_a_stream_gets_its_tensors_by_lanes(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await local.insert([1], None, LARGE, None, None)
    await mapper.map()
    hearer = Hearer()
    mapper.link.open_stream(hearer, Select(has_key=False, stream=True))
    assert "mapped=None" in str(await hearer.next())


async def test_a_grant_of_what_is_mapped_has_it_sent(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await local.insert([1], None, LARGE, None, None)
    await mapper.map()
    hearer, stream, offer, _ = await mapper.select()
    target = torch.zeros_like(LARGE)
    payload = mapper.link.payload
    payload.announce(offer.transfer)
    payload.receive(offer.transfer, 0, bytes_of(target), lambda *_: None)
    stream.send(Grant(offer.transfer))
    assert isinstance((await hearer.next())[0], Sent)
    await until(lambda: target.equal(LARGE))


async def test_a_peer_with_too_many_pins_gets_the_next_entry_by_its_lanes(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, mapper: RawMapper
) -> None:
    monkeypatch.setattr(exporter, "MAX_PINS", 1)
    await local.insert([1], None, LARGE, None, None)
    await mapper.map()
    _, stream, offer, _ = await mapper.select()
    stream.send(Nack(offer.token))
    assert (await mapper.select())[2].mapped is None


async def test_an_offer_that_is_too_long_pins_nothing(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, mapper: RawMapper
) -> None:
    def refuse(max_body_bytes: int, body: bytes) -> None:
        raise EntryTooLarge(nbytes=len(body), max_bytes=max_body_bytes)

    await local.insert([1], None, LARGE, None, None)
    await mapper.map()
    monkeypatch.setattr("asynckv.buffers.serving.select.check_body", refuse)
    hearer = Hearer()
    mapper.link.open_stream(hearer, Select(has_key=False))
    assert isinstance((await hearer.next())[0], Failure)
    assert not local.statistics().mapped_by


def test_memory_of_the_heap_has_no_place() -> None:
    assert exporter.place_of(Region(10, None)) is None

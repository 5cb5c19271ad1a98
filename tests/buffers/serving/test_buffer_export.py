from __future__ import annotations

import os

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.links.dial import dial
from asynckv.links.fd_socket import fetch_file
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Failure,
)
from asynckv.protocol.transfer_frames import Grant, OpenMemory, Proved
from harness.link_pairs import Hearer, name_of
from harness.raw_maps import RawMapper

LARGE = torch.ones(2**18)


async def test_who_reads_the_nonce_is_accepted(mapper: RawMapper) -> None:
    file = await mapper.fetch(await mapper.ask())
    assert await mapper.say(Proved(file.nonce)) == Accepted()


async def test_a_wrong_nonce_leaves_the_link_to_its_lanes(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await mapper.fetch(await mapper.ask())
    assert isinstance(await mapper.say(Proved(b"x" * 16)), Failure)
    await local.insert([1], None, LARGE, None, None)
    assert (await mapper.select())[2].mapped is None


async def test_the_right_nonce_without_a_connection_is_no_mapping(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await mapper.ask()
    file = local.exporter._file
    assert file is not None
    assert isinstance(await mapper.say(Proved(file.nonce)), Failure)


async def test_the_right_nonce_is_nothing_when_the_connection_has_gone(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    mappable = await mapper.ask()
    file = await mapper.fetch(mappable)
    assert mapper.sock is not None
    mapper.sock.close()
    with pytest.raises(Exception, match="file|descriptors"):
        _, fd = await fetch_file(mappable.address, mappable.ticket)
        os.close(fd)
    assert isinstance(await mapper.say(Proved(file.nonce)), Failure)


async def test_a_cancelled_mapping_is_none(
    local: LookupBuffer, mapper: RawMapper
) -> None:
    await mapper.ask()
    assert await mapper.say(Cancel()) == Cancelled()
    assert local.exporter._door is None


async def test_a_link_maps_memory_only_once(mapper: RawMapper) -> None:
    await mapper.map()
    again = Hearer()
    mapper.link.open_stream(again, OpenMemory("lookup"))
    assert "maps memory once" in str((await again.loss()).__cause__)


async def test_what_does_not_belong_there_breaks_the_link(mapper: RawMapper) -> None:
    await mapper.ask()
    with pytest.raises(Exception, match="Grant"):
        await mapper.say(Grant(1))


async def test_a_server_of_lanes_only_shows_nothing(local: LookupBuffer) -> None:
    async with serve("tcp://127.0.0.1:0?payload=inline", lookup=local) as server:
        mapper = RawMapper(await dial(server.url, identity=name_of("consumer")))
        with pytest.raises(ValueError, match="no invitation"):
            await mapper.ask()
        await mapper.aclose()


async def test_a_buffer_that_was_closed_shows_nothing(local: LookupBuffer) -> None:
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        mapper = RawMapper(await dial(server.url, identity=name_of("consumer")))
        local.abort()
        with pytest.raises(ValueError, match="no invitation"):
            await mapper.ask()
        await mapper.aclose()

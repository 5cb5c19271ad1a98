from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asynckv.buffers.remote.peer import connect
from asynckv.buffers.remote.store import begin_put
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.links.link import Link
from asynckv.protocol.frames import Put
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of, spec_of
from asynckv.testing.blocked import until
from asynckv.transfers.source import HostSource
from harness.link_pairs import linked

MIB = 2**20


@pytest.mark.parametrize("digest", ["full", "off"])
async def test_few_bytes_ride_along_with_their_digest(digest: str) -> None:
    side, value = {"digest": digest}, torch.arange(3)
    async with linked("mem://", lambda *_: None, near=side, far=side) as pair:
        begin_put(pair.near, "key", HostSource(value))
        await until(lambda: bool(pair.service.asked))
        _, frame, body = pair.service.asked[0]
        assert isinstance(frame, Put) and frame.inline
        assert (frame.spec, body) == (spec_of(value), bytes(bytes_of(value)))
        assert frame.digest == (digest_of(body) if digest == "full" else b"")


async def test_many_bytes_wait_to_be_granted() -> None:
    async with linked("mem://", lambda *_: None) as pair:
        begin_put(pair.near, "key", HostSource(torch.zeros(MIB)))
        await until(lambda: bool(pair.service.asked))
        _, frame, body = pair.service.asked[0]
        assert isinstance(frame, Put) and not frame.inline and body == b""


@pytest.mark.parametrize("nbytes", [10, MIB])
async def test_a_cut_link_is_made_again_and_the_put_too(
    nbytes: int, cut_when: Callable[[Link, type], None]
) -> None:
    async with (
        StoreBuffer("16MiB") as local,
        serve("tcp://127.0.0.1:0", store=local) as server,
        connect(server.url) as peer,
    ):
        (services,) = server._services
        cut_when(services.link, object)
        await peer.store.put("key", torch.ones(nbytes))
        value = await local.get("key")
        assert value is not None and value.nbytes == 4 * nbytes

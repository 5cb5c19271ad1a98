from __future__ import annotations

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.links.dial import dial
from asynckv.links.fd_socket import has_fd_sockets
from harness.link_pairs import name_of
from harness.raw_maps import RawMapper


@pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")
async def test_a_mapping_made_by_hand_is_a_mapping() -> None:
    async with (
        LookupBuffer("1MiB", drain_s=0) as local,
        serve("tcp://127.0.0.1:0", lookup=local) as server,
    ):
        mapper = RawMapper(await dial(server.url, identity=name_of("consumer")))
        file = await mapper.map()
        assert local.exporter._file is not None
        assert file.nonce == local.exporter._file.nonce
        await mapper.aclose()


async def test_where_nothing_can_be_mapped_it_says_so() -> None:
    async with (
        LookupBuffer("1MiB", drain_s=0) as local,
        serve("mem://", lookup=local) as server,
    ):
        mapper = RawMapper(await dial(server.url, identity=name_of("consumer")))
        with pytest.raises(ValueError, match="no invitation"):
            await mapper.ask()
        await mapper.aclose()

from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import ConfigError
from asynckv.links.address import parse_url
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.options import payload_paths
from harness.link_pairs import linked


@pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")
@pytest.mark.parametrize("url", ["tcp://:1", "tls://:1", "unix:///x"])
def test_memory_may_be_mapped_whatever_the_scheme(url: str) -> None:
    assert payload_paths(parse_url(url)) == ("map", "inline")
    assert payload_paths(parse_url(f"{url}?payload=map")) == ("map",)


def test_each_scheme_has_its_payload_paths() -> None:
    assert payload_paths(parse_url("tcp://:1"))[-1] == "inline"
    assert payload_paths(parse_url("mem://x")) == ("mem", "inline")


def test_a_url_forces_one() -> None:
    assert payload_paths(parse_url("tcp://:1?payload=inline")) == ("inline",)
    assert payload_paths(parse_url("mem://x?payload=inline")) == ("inline",)


def test_one_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="possible: .*inline"):
        payload_paths(parse_url("tcp://:1?payload=nccl"))


@pytest.mark.parametrize(
    ("url", "name"),
    [("tcp://:0", "inline"), ("mem://", "mem"), ("mem://?payload=inline", "inline")],
)
async def test_a_link_has_the_payload_transport_that_was_agreed_on(
    url: str, name: str
) -> None:
    async with linked(url) as pair:
        assert pair.near.transport_name == pair.far.transport_name == name
        assert pair.near.payload.name == name


@pytest.mark.both_loops
@pytest.mark.parametrize("url", ["tcp://:0", "mem://", "mem://?payload=inline"])
async def test_a_payload_crosses_a_link(url: str) -> None:
    async with linked(url, far={"lanes": 2}) as pair:
        source, target = bytes(range(256)) * 4096, bytearray(256 * 4096)
        transfer = pair.near.new_transfer()
        landed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        pair.far.payload.receive(
            transfer, 0, memoryview(target), lambda d, _: landed.set_result(d)
        )
        sent: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        pair.near.payload.send(
            transfer, 0, memoryview(source), lambda d, _: sent.set_result(d)
        )
        assert await landed == await sent
        assert target == source

"""Where we listen, as the kernel says it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

import asynckv
from asynckv.testing.pairs import free_port

pytestmark = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="the kernel tells it on Linux only"
)

LISTENING = "0A"
FAMILIES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}


def listening_hosts() -> list[str]:
    """The addresses at which this process listens now.

    A table that changes while it is read may name one of them twice.
    """
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{fd}"):
            mine |= set(
                re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{fd}"))
            )
    found = {
        inode: host_of(local, family)
        for name, family in FAMILIES.items()
        for _, local, _, state, _, _, _, _, _, inode, *_ in map(
            str.split, Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        )
        if state == LISTENING and inode in mine
    }
    return [*found.values()]


def host_of(local: str, family: socket.AddressFamily) -> str:
    words = re.findall("." * 8, local.partition(":")[0])
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return socket.inet_ntop(family, packed)


def new_buffers() -> asynckv.LookupBuffer:
    return asynckv.LookupBuffer("1MiB", drain_s=0)


OPENERS: dict[str, Callable[[str], AbstractAsyncContextManager[Any]]] = {
    "serve": lambda url: asynckv.serve(url, lookup=new_buffers()),
    "listen_pipe": asynckv.listen_pipe,
}


@pytest.mark.refusal
@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("url", ["tcp://:0", "tcp://127.0.0.1:0", "tcp://[::1]:0"])
async def test_without_protection_the_kernel_knows_a_loopback_address_only(
    opener: str, url: str
) -> None:
    async with OPENERS[opener](url):
        hosts = listening_hosts()
        assert len(hosts) == 1, hosts
        (host,) = hosts
        assert ipaddress.ip_address(host).is_loopback
    assert listening_hosts() == []


@pytest.mark.refusal
@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("url", ["tcp://0.0.0.0:0", "tcp://[::]:0"])
async def test_what_is_refused_was_listened_at_for_no_moment(
    opener: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    binds: list[object] = []
    monkeypatch.setattr(socket.socket, "bind", lambda _, place: binds.append(place))
    with pytest.raises(asynckv.ConfigError, match="beyond this host"):
        async with OPENERS[opener](url):
            raise AssertionError
    assert binds == listening_hosts() == []


@pytest.mark.refusal
async def test_ranks_of_a_group_on_one_host_listen_at_loopback_only() -> None:
    port = free_port()
    ranks = [
        asynckv.join_group(rank=rank, size=2, host="127.0.0.1", port=port)
        for rank in range(2)
    ]
    groups = await asyncio.gather(*(rank.__aenter__() for rank in ranks))
    assert all(ipaddress.ip_address(host).is_loopback for host in listening_hosts())
    for group in groups:
        group.abort()
    await asyncio.gather(*(rank.__aexit__(None, None, None) for rank in ranks))

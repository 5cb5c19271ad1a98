"""What a peer exports, and how a link ends on which it was not opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import Server
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.sharing.peer_imports import PeerImports
from asynckv.tensors import shared_file
from asynckv.testing.blocked import until
from harness.link_pairs import linked


@pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")
async def test_a_file_that_is_refused_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, local: LookupBuffer, mappable: Server
) -> None:
    def refuse(*anything: object) -> Any:
        raise ValueError("it is not sealed")

    monkeypatch.setattr(shared_file, "check_file", refuse)
    async with connect(mappable.url) as peer:
        assert peer.transport == "inline"
        await until(lambda: not local.exporter._importers)
        assert local.exporter._door is None


class Way:
    """In place of one that is being opened."""

    def __init__(self) -> None:
        self.opened: list[Callable[[], None]] = []

    def call_when_opened(self, callback: Callable[[], None]) -> None:
        self.opened.append(callback)


async def test_a_link_that_a_gpu_waits_on_ends_when_it_waits_no_more() -> None:
    imports, way = PeerImports("edges", ""), Way()
    async with linked() as links:
        imports._ways[links.near] = way  # type: ignore[assignment]
        imports.leave(links.near)
        assert links.near.is_open
        (opened,) = way.opened
        opened()
        assert not links.near.is_open


async def test_any_other_link_ends_at_once() -> None:
    async with linked() as links:
        PeerImports("edges", "").leave(links.near)
        assert not links.near.is_open

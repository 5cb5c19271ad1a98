"""A served lookup buffer and two peers of it, and ways to cut a link."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import Peer
from asynckv.buffers.serve import Server
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import Frame
from asynckv.testing.pairs import Peers, open_peers

CutWhen = Callable[[Link, type], None]


@pytest.fixture
async def local() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer("8MiB", drain_s=0, max_deliver=2) as buffer:
        yield buffer


@pytest.fixture
async def peers(local: LookupBuffer) -> AsyncIterator[Peers]:
    async with open_peers("tcp", local, reconnect_s=5) as peers:
        yield peers


@pytest.fixture
def cut_when(monkeypatch: pytest.MonkeyPatch) -> CutWhen:
    """Cut a link instead of sending the first frame of a kind."""

    def cut(link: Link, kind: type) -> None:
        send = LinkStream.send

        def send_or_cut(stream: LinkStream, frame: Frame, body: Buffer = b"") -> None:
            if stream.link is link and isinstance(frame, kind):
                link.abort()
            send(stream, frame, body)

        monkeypatch.setattr(LinkStream, "send", send_or_cut)

    return cut


@pytest.fixture
def far_link() -> Callable[[Server, Peer], Link]:
    """Return the server's end of a peer's link."""

    def find(server: Server, peer: Peer) -> Link:
        links = [services.link for services in server._services]
        name = peer.own_identity.id
        return next(x for x in links if x.peer.id == name and x.is_open)

    return find

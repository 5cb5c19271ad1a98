"""Served buffers and their peers, in memory and on GPUs, and ways to cut a link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

import pytest

from asynckv import LookupBuffer, Peer, Server, connect, serve
from asynckv.devices import growth
from asynckv.devices.copying import CopyPool
from asynckv.links.dial import dial
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.codec import Buffer
from asynckv.protocol.frames import Frame
from asynckv.sharing.mappings import MappedMemory
from asynckv.testing.pairs import Peers, open_peers
from asynckv.transfers import host_copies
from harness.device_memory import open_device_pool
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, NcclBuffers, open_gpu_pair, open_nccl_buffers
from harness.link_pairs import dialled, name_of
from harness.raw_inserts import RawMapper

__all__ = (
    "CutWhen",
    "cut_when",
    "far_link",
    "link",
    "local",
    "mappable",
    "mapper",
    "memory_of",
    "nccl_pair",
    "no_slabs",
    "on_gpu",
    "pair",
    "peers",
    "pool",
    "small_pieces",
)


class CutWhen(Protocol):
    """Cut a link instead of sending the first frame of a kind; call ``then`` behind."""

    def __call__(
        self, link: Link, kind: type, then: Callable[[], object] | None = None
    ) -> None: ...


def memory_of(peer: Peer) -> MappedMemory:
    """Return what a peer has mapped of the other side's memory."""
    link = peer.link_nowait()
    assert link is not None
    memory = peer._imports.of(link)
    assert memory is not None
    return memory


@pytest.fixture
async def local() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer("8MiB", drain_s=0, max_deliver=2) as buffer:
        yield buffer


@pytest.fixture
async def peers(local: LookupBuffer) -> AsyncIterator[Peers]:
    async with open_peers("tcp", local, reconnect_s=5) as peers:
        yield peers


@pytest.fixture
async def link(local: LookupBuffer) -> AsyncIterator[Link]:
    """A peer of the served buffer that says what it likes."""
    async with serve("mem://", lookup=local) as server, dialled(server.url) as link:
        yield link


@pytest.fixture
async def mappable(local: LookupBuffer) -> AsyncIterator[Server]:
    """A server whose memory peers of this host can map."""
    if not has_fd_sockets():
        pytest.skip("nothing can be mapped here")
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        yield server


@pytest.fixture
async def mapper(mappable: Server) -> AsyncIterator[RawMapper]:
    """A peer of it that says what it likes."""
    mapper = RawMapper(await dial(mappable.url, identity=name_of("consumer")))
    yield mapper
    await mapper.aclose()


@pytest.fixture
def cut_when(monkeypatch: pytest.MonkeyPatch) -> CutWhen:
    """What :class:`CutWhen` says."""

    def cut(link: Link, kind: type, then: Callable[[], object] | None = None) -> None:
        send = LinkStream.send

        def send_or_cut(stream: LinkStream, frame: Frame, body: Buffer = b"") -> None:
            if stream.link is link and isinstance(frame, kind):
                link.abort()
                if then is not None:  # before the peer can have dialled again
                    asyncio.get_running_loop().call_soon(then)
            send(stream, frame, body)

        monkeypatch.setattr(LinkStream, "send", send_or_cut)

    return cut


@pytest.fixture
def pool(gpu: FakeDevice) -> Iterator[CopyPool]:
    """That of a buffer on this process's GPU."""
    with open_device_pool(gpu) as pool:
        yield pool


@pytest.fixture
async def on_gpu(local: LookupBuffer) -> AsyncIterator[tuple[FakeDevice, Peer]]:
    """A peer on a GPU of a buffer in host memory."""
    with fake_device() as gpu:
        async with (
            serve("tcp://127.0.0.1:0", lookup=local) as server,
            connect(server.url, device=gpu.device, max_bytes="16MiB") as peer,
        ):
            yield gpu, peer


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    """A buffer and a peer in two processes on one GPU."""
    async with open_gpu_pair(gpus) as pair:
        yield pair


@pytest.fixture
async def nccl_pair(two_gpus: FakeGpus) -> AsyncIterator[NcclBuffers]:
    """A buffer and a peer on two GPUs; the way between them is open."""
    async with open_nccl_buffers(two_gpus) as pair:
        await pair.opened()
        yield pair


@pytest.fixture
def far_link() -> Callable[[Server, Peer], Link]:
    """Return the server's end of a peer's link."""

    def find(server: Server, peer: Peer) -> Link:
        links = [services.link for services in server._services]
        name = peer.own_identity.id
        return next(x for x in links if x.peer.id == name and x.is_open)

    return find


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves a GPU is copied in quarters of a MiB."""
    monkeypatch.setattr(host_copies, "PIECE_NBYTES", 2**18)


@pytest.fixture
def no_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers keep their bytes on the heap, as on a system without memory files."""
    monkeypatch.setattr(growth, "has_slabs", lambda: False)

from __future__ import annotations

import errno
from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import Server, serve
from asynckv.links.dial import dial
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import Cancel, Cancelled
from asynckv.protocol.transfer_frames import Exposed, Grant, OpenMemory, Proved
from asynckv.sharing import exporter
from harness.fake_devices import FakeDevice
from harness.link_pairs import Hearer, name_of

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


@pytest.fixture
async def link(gpu: FakeDevice) -> AsyncIterator[Link]:
    """One to a server whose buffer is on the GPU."""
    async with (
        LookupBuffer("1MiB", device=gpu.device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):
        link = await dial(server.url, identity=name_of("consumer"))
        yield link
        await link.aclose()


async def exported(gpu: FakeDevice, link: Link) -> tuple[Hearer, LinkStream]:
    hearer = Hearer()
    stream = link.open_stream(hearer, OpenMemory("lookup", gpu.process.cuda.uuid(0)))
    frame, _ = await hearer.next()
    assert isinstance(frame, Exposed)
    return hearer, stream


async def refusal_at(server: Server, gpu: FakeDevice) -> str:
    """Ask a server for the memory of this GPU; return what it says."""
    link = await dial(server.url, identity=name_of("consumer"))
    hearer = Hearer()
    link.open_stream(hearer, OpenMemory("lookup", gpu.process.cuda.uuid(0)))
    answer = str(await hearer.next())
    await link.aclose()
    return answer


async def test_a_peer_on_another_gpu_is_told_which_one_the_memory_is_on(
    gpu: FakeDevice, link: Link
) -> None:
    hearer = Hearer()
    link.open_stream(hearer, OpenMemory("lookup", "0" * 32))
    frame, _ = await hearer.next()
    assert isinstance(frame, Exposed)
    assert frame.gpu_uuid == gpu.process.cuda.uuid(0)


async def test_a_wrong_nonce_is_no_proof(gpu: FakeDevice, link: Link) -> None:
    hearer, stream = await exported(gpu, link)
    stream.send(Proved(b"x" * 16))
    assert "not what the memory holds" in str(await hearer.next())


async def test_who_cancels_has_nothing(gpu: FakeDevice, link: Link) -> None:
    hearer, stream = await exported(gpu, link)
    stream.send(Cancel())
    assert (await hearer.next())[0] == Cancelled()


async def test_another_frame_breaks_the_link(gpu: FakeDevice, link: Link) -> None:
    hearer, stream = await exported(gpu, link)
    stream.send(Grant(1))
    assert "Grant" in str((await hearer.loss()).__cause__)


async def test_a_link_of_lanes_only_is_refused(gpu: FakeDevice) -> None:
    async with (
        LookupBuffer("1MiB", device=gpu.device, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0?payload=inline", lookup=buffer) as server,
    ):
        assert "no memory of a GPU" in await refusal_at(server, gpu)


async def test_a_buffer_in_host_memory_has_no_gpu_to_show(
    gpu: FakeDevice, mappable: Server
) -> None:
    assert "no memory of a GPU" in await refusal_at(mappable, gpu)


async def test_without_the_name_of_a_gpu_no_memory_of_one_is_shown(
    gpu: FakeDevice, link: Link
) -> None:
    hearer = Hearer()
    link.open_stream(hearer, OpenMemory("lookup"))
    assert "no memory that could be mapped" in str(await hearer.next())


async def test_a_process_without_files_to_spare_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice, link: Link
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(exporter, "FdDoor", refuse)
    hearer = Hearer()
    link.open_stream(hearer, OpenMemory("lookup", gpu.process.cuda.uuid(0)))
    assert "no memory of a GPU" in str(await hearer.next())


async def test_memory_is_opened_once_on_a_link(gpu: FakeDevice, link: Link) -> None:
    await exported(gpu, link)
    hearer = Hearer()
    link.open_stream(hearer, OpenMemory("lookup", gpu.process.cuda.uuid(0)))
    assert "maps memory once" in str((await hearer.loss()).__cause__)

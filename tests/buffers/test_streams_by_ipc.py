"""Layers of a buffer on a GPU, streamed to another process on the same GPU."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
import torch

from asynckv import (
    GPUFailed,
    LookupBuffer,
    Peer,
    TensorSpec,
    connect,
    serve,
)
from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.serving import select as offer
from asynckv.devices.arena import DeviceRegion
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.options import Digest
from asynckv.protocol.transfer_frames import Sent
from asynckv.sharing import exporter
from asynckv.testing import until, until_blocked
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.host_copies import D2HCopier
from asynckv.transfers.source import Source
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.streams import Delay
from harness.gpu_pairs import GpuPair, open_gpu_pair

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

LAYERS = {
    "0.key": TensorSpec((MIB,), "uint8"),
    "hidden": TensorSpec((8,), "uint8"),
    "1.key": TensorSpec((MIB,), "uint8"),
}


@pytest.fixture(autouse=True)
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that is brought to host memory for a peer."""
    copied: list[int] = []
    copy = D2HCopier.copy

    async def note(self: D2HCopier, source: Source, *anything: object) -> None:
        copied.append(source.nbytes)
        await copy(self, source, *anything)  # type: ignore[arg-type]

    monkeypatch.setattr(D2HCopier, "copy", note)
    return copied


def layer(pair: GpuPair, name: str) -> torch.Tensor:
    """Return a layer on the GPU of the buffer's own process."""
    return pair.ours.tensor(content(name))


def content(name: str) -> torch.Tensor:
    return noise(LAYERS[name].shape[0], [*LAYERS].index(name) + 1)


async def fill(buffer: LookupBuffer) -> None:
    """Insert two large layers and a small one."""
    async with buffer.open_insert([1], None, LAYERS) as writer:
        for name in LAYERS:
            await writer.put(name, content(name))


async def read(peer: Peer, **into: torch.Tensor) -> dict[str, torch.Tensor]:
    """Stream all of an entry."""
    wanted = {name.replace("_", "."): tensor for name, tensor in into.items()}
    async with peer.lookup.open_drop_select([1], into=wanted) as stream:
        return {name: tensor async for name, tensor in stream}


def expect_all(found: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(LAYERS)
    assert all(is_same(found[name], content(name)) for name in LAYERS)


def only(buffer: LookupBuffer) -> StoredEntry:
    (entry,) = buffer.ledger.table.entries.values()
    return entry


async def emptied(pair: GpuPair) -> None:
    """Wait until neither side has anything of the entry."""
    await until(lambda: not pair.buffer.statistics().used_bytes)
    await until(lambda: not pair.buffer.statistics().mapped_by)
    await until(lambda: not pair.pinned_bytes)  # the GPU has left it
    assert not pair.peer.budget.used_bytes


async def test_layers_are_copied_within_the_gpu_as_they_come(
    pair: GpuPair, sent_devices: list[Sent], copied: list[int]
) -> None:
    async with (
        pair.buffer.open_insert([1], None, LAYERS) as writer,
        pair.peer.lookup.open_drop_select([1]) as stream,
    ):
        for name in LAYERS:
            await writer.put(name, layer(pair, name))
            found = await stream.wait_for(name)
            assert found.is_cuda and is_same(found, content(name))
    assert [(frame.part, frame.kind) for frame in sent_devices] == [
        (0, "edges"),
        (2, "edges"),
    ]
    assert copied == [8]
    await emptied(pair)


async def test_layers_land_in_memory_of_the_gpu_that_the_caller_has(
    pair: GpuPair, sent_devices: list[Sent]
) -> None:
    await fill(pair.buffer)
    into = pair.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))
    pair.theirs.tensors.stream(0).add(Delay(20))  # what its owner still does there
    found = await read(pair.peer, **{"0_key": into})
    assert found["0.key"] is into and len(sent_devices) == 2
    expect_all(found)
    await emptied(pair)


async def test_what_is_wanted_in_host_memory_comes_by_lanes(
    pair: GpuPair, sent_devices: list[Sent]
) -> None:
    await fill(pair.buffer)
    into = torch.zeros(MIB, dtype=torch.uint8)
    async with pair.peer.lookup.open_drop_select([1], into={"0.key": into}) as stream:
        await until(lambda: not pair.buffer.statistics().mapped_by)
        found = {name: tensor async for name, tensor in stream}
    assert found["0.key"] is into and not sent_devices
    expect_all(found)
    await emptied(pair)


async def test_a_url_that_asks_for_lanes_gets_them(
    pair: GpuPair, sent_devices: list[Sent]
) -> None:
    url, device = f"{pair.server.url}?payload=inline", pair.theirs.device
    async with connect(url, device=device, max_bytes="16MiB") as peer:
        await fill(pair.buffer)
        expect_all(await read(peer))
    assert not sent_devices


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ("auto", "auto", "edges"),
        ("full", "off", "full"),
        ("off", "full", "full"),
        ("off", "off", "off"),
    ],
)
async def test_the_stricter_digest_is_compared(
    gpus: FakeGpus,
    sent_devices: list[Sent],
    ours: Digest,
    theirs: Digest,
    kind: str,
) -> None:
    here, there = (fake_device_of(gpus.process()).device for _ in range(2))
    async with (
        LookupBuffer("16MiB", device=here, drain_s=0) as buffer,
        serve("tcp://127.0.0.1:0", lookup=buffer, digest=ours) as server,
        connect(server.url, device=there, digest=theirs, max_bytes="16MiB") as peer,
    ):
        await fill(buffer)
        expect_all(await read(peer))
    assert {frame.kind for frame in sent_devices} == {kind}
    assert all(bool(frame.digest) is (kind != "off") for frame in sent_devices)


async def test_what_has_no_known_edges_is_compared_whole(
    pair: GpuPair, sent_devices: list[Sent]
) -> None:
    await fill(pair.buffer)
    entry = only(pair.buffer)
    for index in (0, 2):
        region = entry.regions[index]
        assert isinstance(region, DeviceRegion)
        region.edges = b""
    entry.parts[2].digest = b""  # it has none, and gets one
    expect_all(await read(pair.peer))
    assert [frame.kind for frame in sent_devices] == ["full", "full"]
    assert all(frame.digest for frame in sent_devices)


async def test_leaving_early_lets_the_memory_go(pair: GpuPair) -> None:
    async with pair.buffer.open_insert([1], None, LAYERS) as writer:
        await writer.put("0.key", content("0.key"))
        async with pair.peer.lookup.open_drop_select([1]) as stream:
            await stream.wait_for("0.key")
            assert pair.buffer.statistics().mapped_by  # all there is to come
        await emptied(pair)
        await writer.put("1.key", content("1.key"))
        await writer.put("hidden", content("hidden"))


async def test_a_peer_that_has_closed_the_memory_is_shown_nothing_more(
    pair: GpuPair, sent_devices: list[Sent], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, offer.__name__)
    async with pair.buffer.open_insert([1], None, LAYERS) as writer:
        await writer.put("0.key", content("0.key"))
        with pytest.raises(GPUFailed, match="closed the memory"):
            async with pair.peer.lookup.open_drop_select([1]) as stream:
                await stream.wait_for("0.key")
                (importer,) = pair.buffer.exporter._importers
                importer.close()
                await until(lambda: not importer.is_connected)
                await writer.put("1.key", content("1.key"))
                await stream.wait_for("1.key")
        await writer.put("hidden", content("hidden"))
    assert caplog.text.count("through host memory") == 1
    assert len(sent_devices) == 1
    expect_all(await read(pair.peer))  # by lanes
    assert len(sent_devices) == 1 and pair.peer.transport == "cuda_ipc"
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_a_stream_that_was_entered_does_not_begin_again_by_itself(
    pair: GpuPair, sent_devices: list[Sent]
) -> None:
    async with pair.buffer.open_insert([1], None, LAYERS) as writer:
        with pytest.raises(GPUFailed, match="closed the memory"):
            async with pair.peer.lookup.open_drop_select([1]) as stream:
                (importer,) = pair.buffer.exporter._importers
                importer.close()
                await until(lambda: not importer.is_connected)
                await writer.put("0.key", content("0.key"))
                await anext(stream)
        await until(lambda: not pair.buffer.statistics().leased)
        async with pair.peer.lookup.open_drop_select([1]) as stream:
            name, tensor = await anext(stream)
            assert (stream.attempt, name, sent_devices) == (2, "0.key", [])
            assert is_same(tensor, content(name))
        for name in ("hidden", "1.key"):
            await writer.put(name, content(name))


async def test_a_peer_that_keeps_too_many_deliveries_gets_the_next_by_lanes(
    pair: GpuPair, sent_devices: list[Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "MAX_PINS", 0)
    await fill(pair.buffer)
    expect_all(await read(pair.peer))
    assert not sent_devices


async def test_a_stream_that_ends_while_a_layer_is_copied_is_quiet_first(
    pair: GpuPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = asyncio.Event()
    pool = pair.peer.pool
    copy = pool.copy

    async def slow(*places: object, digest: bool = True) -> list[bytes]:
        await going.wait()
        return await copy(*places, digest=digest)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "copy", slow)
    await fill(pair.buffer)
    async with pair.peer.lookup.open_drop_select([1]):
        assert pair.buffer.statistics().mapped_by
    going.set()
    await emptied(pair)


async def test_a_stream_waits_for_room_in_its_bound(gpus: FakeGpus) -> None:
    async with open_gpu_pair(gpus, max_bytes=3 * MIB) as pair:
        await fill(pair.buffer)
        async with contextlib.AsyncExitStack() as stack:
            reading = pair.peer.lookup.open_drop_select([1])
            first = await stack.enter_async_context(reading)
            expect_all({name: await first.wait_for(name) for name in LAYERS})
            await fill(pair.buffer)
            second = asyncio.create_task(read(pair.peer))
            await until(lambda: pair.buffer.statistics().leased == 2)
            await until_blocked(second)
        expect_all(await second)
        await emptied(pair)

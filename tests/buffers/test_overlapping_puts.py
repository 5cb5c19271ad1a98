"""What peers put from a GPU: copied while more of it is on the wire.

No clock says so, held copies do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.insert import Sending
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import ChecksumError, GPUFailed
from asynckv.links.link import Link
from asynckv.protocol.frames import Accepted, Frame
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.host_copies import HostCopies
from asynckv.types import TensorSpec
from harness.fake_devices import FakeDevice, fake_device
from harness.held_copies import bytes_of_tensor, held_copies
from harness.link_pairs import landed_bytes

pytestmark = pytest.mark.usefixtures("small_pieces")

PIECE = MIB // 4

LAYERS = {name: TensorSpec((MIB,), "uint8") for name in ("key", "value")}
FarLink = Callable[[Server, Peer], Link]


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=2) as gpu:
        yield gpu


@asynccontextmanager
async def producing(
    gpu: FakeDevice, *, lanes: int | None = None
) -> AsyncIterator[tuple[LookupBuffer, StoreBuffer, Server, Peer]]:
    """A peer whose tensors are on a GPU, and buffers in host memory."""
    async with (
        LookupBuffer("16MiB", drain_s=0) as lookup,
        StoreBuffer("8MiB") as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store, lanes=lanes) as server,
        connect(server.url, lanes=lanes) as peer,
    ):
        peer.pool.lanes = gpu.lanes()
        yield lookup, store, server, peer


class Watched(HostCopies):
    """Knows the most that there ever was."""

    most = 0

    async def empty(self, nbytes: int) -> memoryview:
        memory = await super().empty(nbytes)
        self.most = max(self.most, self.used_bytes)
        return memory


async def test_one_tensor_is_on_the_wire_while_the_next_is_copied(
    gpu: FakeDevice,
) -> None:
    key, value = gpu.tensor(noise(MIB, 1)), gpu.tensor(noise(MIB, 2))
    async with producing(gpu) as (lookup, _, _, peer):
        with held_copies(gpu.process, bytes_of_tensor(gpu, value)) as gate:
            insert = peer.lookup.insert([1], None, key, value, None)
            task = asyncio.create_task(insert)
            entries = lookup.ledger.table.entries
            await until(lambda: any(entry.landed == [0] for entry in entries.values()))
            assert not task.done()
            gate.open()
            await task
        entry = await lookup.drop_select([1])
        assert is_same(only(entry.key), noise(MIB, 1))
        assert is_same(only(entry.value), noise(MIB, 2))


@pytest.mark.parametrize("call", ["insert", "layer", "value"])
async def test_one_piece_is_on_the_wire_while_the_next_is_copied(
    gpu: FakeDevice, far_link: FarLink, call: str
) -> None:
    source = gpu.tensor(noise(MIB))
    async with producing(gpu) as (lookup, store, server, peer):
        with held_copies(gpu.process, bytes_of_tensor(gpu, source, PIECE)) as gate:
            task = asyncio.create_task(send(peer, call, source))
            await until(lambda: landed_bytes(far_link(server, peer)) == PIECE)
            await until_blocked(task)
            assert not task.done()
            gate.open()
            await task
        if call == "value":
            found = await store.get("key")
        else:
            found = only((await lookup.drop_select([1])).key)
        assert found is not None and is_same(found, noise(MIB))


async def send(peer: Peer, call: str, source: torch.Tensor) -> None:
    if call == "value":
        await peer.store.put("key", source)
    elif call == "insert":
        await peer.lookup.insert([1], None, source, None, None)
    else:
        specs = {"key": LAYERS["key"]}
        async with peer.lookup.open_insert([1], None, specs) as writer:
            await writer.put("key", source)


@pytest.mark.parametrize("lanes", [1, 2])
async def test_what_leaves_a_gpu_takes_a_bounded_part_of_the_host(
    gpu: FakeDevice, lanes: int
) -> None:
    layers = {str(n): gpu.tensor(noise(MIB + n, n)) for n in range(4)}
    async with producing(gpu, lanes=lanes) as (lookup, _, _, peer):
        peer.routes.copies = copies = Watched(2 * PIECE)
        await peer.lookup.insert([1], None, layers, None, gpu.tensor(noise(8)))
        entry = await lookup.drop_select([1])
        assert isinstance(entry.key, dict)
        for number, name in enumerate(layers):
            assert is_same(entry.key[name], noise(MIB + number, number))
        assert copies.most <= 2 * PIECE
        await until(lambda: not copies.used_bytes)


async def test_what_waits_for_room_takes_no_memory_of_the_host(
    gpu: FakeDevice,
) -> None:
    key = gpu.tensor(noise(MIB))
    async with producing(gpu) as (lookup, _, _, peer):
        peer.routes.copies = copies = Watched()
        await lookup.insert([2], None, noise(15 * MIB + 1, 2), None, None)
        task = asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
        await until(lambda: lookup.statistics().waiting_inserts == 1)
        assert not task.done() and not copies.most
        await lookup.drop_select([2])
        await task
        assert is_same(only((await lookup.drop_select([1])).key), noise(MIB))


async def test_what_was_given_back_on_its_way_is_read_again(gpu: FakeDevice) -> None:
    key = gpu.tensor(noise(MIB))
    async with producing(gpu) as (lookup, _, _, peer):
        await lookup.insert([2], None, noise(15 * MIB + 1, 2), None, None)
        task = asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
        with contextlib.suppress(KeyboardInterrupt):
            async with lookup.drop_select([1]) as entry:
                assert is_same(only(entry.key), noise(MIB))
                del entry
                raise KeyboardInterrupt
        assert not task.done()
        assert is_same(only((await lookup.drop_select([1])).key), noise(MIB))
        await task


@pytest.mark.parametrize("call", ["insert", "layer", "value"])
async def test_a_cancelled_call_leaves_the_callers_memory_alone(
    gpu: FakeDevice, call: str
) -> None:
    source = gpu.tensor(noise(MIB))
    async with producing(gpu) as (lookup, store, _, peer):

        async def before() -> None:
            source.copy_(noise(MIB))

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            assert not [x for x in gpu.process.space.allocations() if x.users]
            source.fill_(9)
            await peer.lookup.peek([1])
            await peer.store.contains(["other"])
            if call == "value":
                found = await store.get("key")
                assert found is not None or outcome.cancelled
            else:
                table = lookup.ledger.table
                await until(lambda: all(e.complete for e in table.entries.values()))
                found = None
                if lookup.statistics().entries:
                    found = only((await lookup.drop_select([1])).key)
                assert found is not None or outcome.cancelled
            assert found is None or is_same(found, noise(MIB))
            del found
            await store.delete("key")
            await until(lambda: not peer.routes.copies.used_bytes)

        operation = lambda: send(peer, call, source)  # noqa: E731
        await sweep_cancellation(operation, check, before=before)


async def test_other_bytes_than_were_digested_are_refused(gpu: FakeDevice) -> None:
    key = gpu.tensor(noise(MIB))
    async with producing(gpu) as (lookup, _, _, peer):
        with held_copies(gpu.process, bytes_of_tensor(gpu, key, PIECE)) as gate:
            insert = peer.lookup.insert([1], None, key, None, None, entry_id="it")
            gate.open()
            await insert
            assert (await lookup.drop_select([1])).entry_id == "it"
        digest = peer.pool.digest

        async def digested_before(tensors: list[object]) -> list[bytes]:
            found = await digest(tensors)  # type: ignore[arg-type]
            key.fill_(9)
            return found

        peer.pool.digest = digested_before  # type: ignore[assignment, method-assign]
        with pytest.raises(ChecksumError):
            await peer.lookup.insert([1], None, key, None, None, entry_id="it2")
        assert not lookup.statistics().entries


async def test_a_gpu_that_fails_between_two_pieces_withdraws_the_insert(
    gpu: FakeDevice,
) -> None:
    key = gpu.tensor(noise(MIB))
    async with producing(gpu) as (lookup, _, server, peer):
        with held_copies(gpu.process, bytes_of_tensor(gpu, key, PIECE)) as gate:
            task = asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
            (link,) = [service.link for service in server._services]
            await until(lambda: landed_bytes(link) == PIECE)
            gate.fail(GPUFailed("it has fallen off the bus"))
            with pytest.raises(GPUFailed, match="off the bus") as kept:
                await task
        await until(lambda: not lookup.statistics().used_bytes)
        await until(lambda: not peer.routes.copies.used_bytes)
        assert link.is_open and kept.value.__traceback__ is not None


async def test_what_is_accepted_early_is_fed_no_further(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    sendings, on_frame = list[Sending](), Sending.on_frame

    def note(sending: Sending, frame: Frame, body: bytes) -> None:
        sendings.append(sending)
        on_frame(sending, frame, body)

    monkeypatch.setattr(Sending, "on_frame", note)
    key = gpu.tensor(noise(MIB))
    async with producing(gpu) as (_, _, server, peer):
        link = peer.link_nowait()
        assert link is not None
        with held_copies(gpu.process, bytes_of_tensor(gpu, key, PIECE)) as gate:
            task = asyncio.create_task(peer.lookup.insert([1], None, key, None, None))
            (far,) = [service.link for service in server._services]
            await until(lambda: landed_bytes(far) == PIECE)
            sendings[0].on_frame(Accepted(), b"")
            gate.open()
            await task
        assert not link.payload._leaving  # type: ignore[attr-defined]
        await until(lambda: not peer.routes.copies.used_bytes)

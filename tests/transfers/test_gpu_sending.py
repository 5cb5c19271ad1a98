from __future__ import annotations

import asyncio

from asynckv.protocol.frames import Get
from asynckv.protocol.transfer_frames import GrantDevices
from asynckv.tensors.cuda import DeviceMemory
from asynckv.testing.blocked import until
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.transfers.outgoing import GpuSending
from asynckv.types import TensorSpec
from harness.link_pairs import Hearer
from harness.nccl_buffer_pairs import NcclBuffers


def no_digest(*anything: object) -> asyncio.Task[None]:
    raise AssertionError(anything)


async def test_of_what_was_not_sent_the_peer_hears_nothing(
    nccl_pair: NcclBuffers,
) -> None:
    buffer, way = nccl_pair.buffer, nccl_pair.devices.way
    assert way is not None
    await buffer.insert([1], None, noise(MIB), None, None)
    (entry,) = buffer.ledger.book.entries.values()
    link, errors = nccl_pair.peer._linked(), list[BaseException | None]()
    stream = link.open_stream(Hearer(), Get("nothing"))
    way.transport.abort()
    sending = GpuSending(way, stream, GrantDevices(1, "full"), no_digest)
    sending.send(0, entry.regions[0], TensorSpec((MIB,), "uint8"), b"")
    after = entry.regions[0].place(TensorSpec((MIB,), "uint8"))
    assert isinstance(after, DeviceMemory)
    way.transport.send(3, 0, after, lambda _, error: errors.append(error))
    await until(lambda: bool(errors))
    assert errors[0] is not None and link.is_open
    sending.stop()

from __future__ import annotations

import pytest

from asynckv.buffers.in_memory import InMemoryBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.store import StoreBuffer
from harness.fake_devices import fake_device

KINDS = [LookupBuffer, StoreBuffer]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_has_no_device_is_in_host_memory(
    kind: type[LookupBuffer | StoreBuffer],
) -> None:
    async with kind("1MiB") as buffer:
        assert isinstance(buffer, InMemoryBuffer)
        assert not buffer.is_on_gpu and buffer.growth.open_device is None
        await buffer.open()


async def test_a_device_is_open_while_the_buffer_is() -> None:
    with fake_device() as gpu:
        buffer = LookupBuffer("1MiB", device=gpu.device)
        assert buffer.is_on_gpu and buffer.growth.open_device is None
        await buffer.open()
        assert buffer.growth.open_device == gpu.device
        buffer.abort()
        await buffer.aclose()
        assert buffer.growth.open_device is None and not gpu.process.owned


async def test_a_buffer_is_shown_with_what_it_holds() -> None:
    async with LookupBuffer(100, drain_s=0) as buffer, StoreBuffer(100) as store:
        await buffer.insert([1, 2], None, None, None, None)
        assert repr(buffer) == "<LookupBuffer, 1 entries, 16 of 100 bytes>"
        assert repr(store) == "<StoreBuffer, 0 keys, 0 of 100 bytes>"


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_of_no_bytes_is_refused(
    kind: type[LookupBuffer | StoreBuffer],
) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        kind("0 GiB")

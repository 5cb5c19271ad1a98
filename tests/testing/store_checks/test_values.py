from __future__ import annotations

from asynckv.buffers.store import StoreBuffer
from asynckv.testing.store_checks.values import large, until_only


async def test_eight_large_values_fit_and_one_is_left() -> None:
    async with StoreBuffer("16MiB") as buffer:
        for number in range(8):
            await buffer.put(str(number), large(buffer))
        assert buffer.statistics().keys == 8
        for number in range(1, 8):
            await buffer.delete(str(number))
        await until_only(buffer, "0")
        await until_only(buffer, "0")

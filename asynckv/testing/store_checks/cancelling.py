"""Put and get, cancelled at each of their suspensions."""

from __future__ import annotations

from typing import Final

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import (
    CANCEL_MODES,
    expect,
    expect_same,
    is_same,
    noise,
)
from asynckv.testing.store_checks.values import StoreCheck, large, until_only

__all__ = (
    "CANCELLING_CHECKS",
    "a_cancelled_get_leaves_into_alone",
    "a_cancelled_put_stores_all_or_nothing",
)


async def a_cancelled_put_stores_all_or_nothing(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """Never a mix, and never what the caller writes into the tensor afterwards."""
    old = large(local)
    for nbytes in (64, old.nbytes):
        await _cancel_puts(client, old, noise(nbytes, 2))
    await until_only(local, "key")


async def a_cancelled_get_leaves_into_alone(
    client: KVStoreBuffer, local: StoreBuffer
) -> None:
    """``into`` is the caller's again, and the next ``get`` is as good as ever."""
    for value in (noise(64, 1), large(local)):
        await client.put("key", value)
        await _cancel_gets(client, value)
    await until_only(local, "key")


CANCELLING_CHECKS: Final[tuple[StoreCheck, ...]] = (
    a_cancelled_put_stores_all_or_nothing,
    a_cancelled_get_leaves_into_alone,
)


async def _cancel_puts(
    client: KVStoreBuffer, old: torch.Tensor, new: torch.Tensor
) -> None:
    source = new.clone()

    async def before() -> None:
        await client.put("key", old)
        source.copy_(new)

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        source.fill_(0)
        value = await client.get("key")
        if not outcome.cancelled or not is_same(value, old):
            expect_same(value, new)

    await sweep_cancellation(
        lambda: client.put("key", source), check, before=before, modes=CANCEL_MODES
    )


async def _cancel_gets(client: KVStoreBuffer, value: torch.Tensor) -> None:
    into = torch.zeros_like(value)

    async def check(
        k: int, mode: CancelMode, outcome: Outcome[torch.Tensor | None]
    ) -> None:
        into.fill_(9)
        expect_same(await client.get("key"), value)
        expect(bool((into == 9).all()), "into was written to after the cancellation")

    await sweep_cancellation(
        lambda: client.get("key", into=into), check, modes=CANCEL_MODES
    )

"""Buffers on a GPU: entered and left, or as if their opening had never begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from asynckv.abc import KVCacheBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.cancellations.grounds import Ground
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.sweeper import Sweeper
from asynckv.testing.expectations import expect
from asynckv.testing.fake_devices import FakeDevice, fake_device

__all__ = ("ON_GPUS", "a_lookup_on_a_gpu", "a_store_on_a_gpu")


async def a_lookup_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has its memory when it is entered, and none when it is closed."""
    with fake_device() as gpu:
        await _enter(
            *("a lookup on a GPU", ground, sweeper, gpu),
            lambda: LookupBuffer("1MiB", device=gpu.device, drain_s=0),
        )


async def a_store_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As a lookup buffer."""
    with fake_device() as gpu:
        await _enter(
            *("a store on a GPU", ground, sweeper, gpu),
            lambda: StoreBuffer("1MiB", device=gpu.device),
        )


async def _enter(
    name: str,
    ground: Ground,
    sweeper: Sweeper,
    gpu: FakeDevice,
    make: Callable[[], KVCacheBuffer],
) -> None:
    own: KVCacheBuffer

    async def before() -> None:
        nonlocal own
        own = make()

    async def use() -> None:
        async with own:
            expect(bool(gpu.process.owned), "it was entered without memory")

    async def check(outcome: Outcome[None]) -> None:
        await own.aclose()
        await until(lambda: not gpu.process.owned)
        await ground.check_quiet()

    await sweeper.sweep(name, use, check, before)


_LOOKUP: Final = ("LookupBuffer.__aenter__", "LookupBuffer.open")
_STORE: Final = ("StoreBuffer.__aenter__", "StoreBuffer.open")

ON_GPUS: Final = (
    Scenario(a_lookup_on_a_gpu, _LOOKUP, ("local",), sizes=(0,), is_costly=True),
    Scenario(a_store_on_a_gpu, _STORE, ("local",), sizes=(0,), is_costly=True),
)

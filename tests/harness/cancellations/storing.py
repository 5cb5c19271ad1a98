"""Values by name: the old one or the new one, and nothing between."""

from __future__ import annotations

import itertools
from typing import Any, Final

from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, expect_same, is_same, noise
from asynckv.types import TensorSpec
from harness.cancellations.entries import (
    OVERWRITE,
    Partner,
    expect_overwritten,
    zeros,
)
from harness.cancellations.grounds import BUFFER_BYTES, Ground
from harness.cancellations.sweeper import SMALL, Sweeper, scenario

__all__: tuple[str, ...] = ()

_KEY: Final = "key"
_KEYS: Final = (_KEY, "no key")
_SEVERAL: Final = tuple(f"key {number}" for number in range(3))
_FILLER: Final = TensorSpec((BUFFER_BYTES - 64,), "uint8")
_ONE_SIZE: Final = (SMALL,)


@scenario("KVStoreBuffer.put")
async def a_put(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """In place of another value, which is there until the new one is."""
    source, new, numbers = zeros(nbytes), noise(nbytes, 60), itertools.cycle(range(50))

    async def put() -> None:
        try:
            await ground.client.put(_KEY, source)
        finally:
            source.fill_(OVERWRITE)

    async for cancel in sweeper.sweep():
        old = noise(nbytes, next(numbers))
        source.copy_(new)
        await ground.store.put(_KEY, old)
        outcome = await cancel(put)
        source.fill_(OVERWRITE)
        value = await ground.client.get(_KEY)
        if not outcome.cancelled or not is_same(value, old):
            expect_same(value, new)
        if ground.is_local and outcome.cancelled:
            expect_same(value, old)


@scenario("KVStoreBuffer.put")
async def a_put_that_waits_for_room(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """Until another put gives its room back, soon or in that very tick."""
    new, values = noise(nbytes, 1), ground.store.values

    async def free(filler: Any) -> None:
        values.discard(filler)

    async for cancel in sweeper.sweep():
        for key in (_KEY, "other"):
            await ground.store.delete(key)
        partner = Partner(
            sweeper,
            lambda: ground.store.statistics().waiting_puts > 0,
            *(free, await values.reserve("filler", _FILLER, None)),
        )
        outcome = await cancel(ground.client.put, _KEY, new)
        await partner.ended()
        value = await ground.client.get(_KEY)
        expect(outcome.cancelled or value is not None, "it was stored")
        if value is not None:
            expect_same(value, new)
        await ground.client.put("other", new)  # there is room again


@scenario("KVStoreBuffer.get")
async def a_get(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into memory of the caller, who has it back."""
    value, into = noise(nbytes, 3), zeros(nbytes)
    await ground.client.put(_KEY, value)

    async def get() -> None:
        into.zero_()
        try:
            expect_same(await ground.client.get(_KEY, into=into), value)
        finally:
            into.fill_(OVERWRITE)

    async for cancel in sweeper.sweep():
        await cancel(get)
        into.fill_(OVERWRITE)
        expect_same(await ground.client.get(_KEY), value)
        await ground.check_quiet()
        expect_overwritten(into)


@scenario("KVStoreBuffer.delete", "KVStoreBuffer.put", sizes=_ONE_SIZE)
async def a_delete(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Forgets the key or does not; by ``put(key, None)`` too."""
    value, client = noise(nbytes, 4), ground.client
    calls: tuple[Any, ...] = ((client.delete, _KEY), (client.put, _KEY, None))
    for way, call in enumerate(calls):
        async for cancel in sweeper.sweep(f"{way}"):
            await ground.store.put(_KEY, value)
            outcome = await cancel(*call)
            found = await client.get(_KEY)
            expect(outcome.cancelled or found is None, "it was forgotten")
            if found is not None:
                expect_same(found, value)


@scenario("KVStoreBuffer.clear", sizes=_ONE_SIZE)
async def a_clear(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Forgets all keys or does not."""
    async for cancel in sweeper.sweep():
        for key in (_KEY, "other"):
            await ground.store.put(key, noise(nbytes, 9))
        outcome = await cancel(ground.client.clear)
        found = await ground.client.contains([_KEY, "other"])
        expect(found in ((True, True), (False, False)), f"all or none: {found}")
        expect(outcome.cancelled or not any(found), "all were forgotten")


@scenario(
    *("KVStoreBuffer.contains", "KVStoreBuffer.match_prefix", "KVStoreBuffer.stat"),
    sizes=_ONE_SIZE,
)
async def a_question(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Leaves no trace."""
    client = ground.client
    calls: dict[str, Any] = {
        "contains": lambda: client.contains(_KEYS),
        "match_prefix": lambda: client.match_prefix(_KEYS),
        "stat": lambda: client.stat(_KEY),
    }
    await ground.store.put(_KEY, noise(nbytes, 5))
    there = dict(zip(calls, [await call() for call in calls.values()], strict=True))
    expect(there["contains"] == (True, False) and there["match_prefix"] == 1, there)
    expect(there["stat"] is not None, "it is there")
    for name, call in calls.items():
        async for cancel in sweeper.sweep(name):
            outcome = await cancel(call)
            expect(outcome.cancelled or outcome.value == there[name], f"{outcome}")
            expect(await call() == there[name], f"{name} is another")


@scenario("KVStoreBuffer.put_many")
async def many_puts(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Each stores all or nothing, and none reads its tensor any more."""
    sources = {key: noise(nbytes, number) for number, key in enumerate(_SEVERAL)}
    expected = {key: source.clone() for key, source in sources.items()}

    async def put() -> tuple[bool, ...]:
        try:
            return await ground.client.put_many(sources.items())
        finally:
            for source in sources.values():
                source.fill_(OVERWRITE)

    async for cancel in sweeper.sweep():
        for key, source in sources.items():
            await ground.store.delete(key)
            source.copy_(expected[key])
        outcome = await cancel(put)
        for key, value in expected.items():
            found = await ground.client.get(key)
            expect(outcome.cancelled or found is not None, "it was stored")
            if found is not None:
                expect_same(found, value)


@scenario("KVStoreBuffer.get_many")
async def many_gets(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into memory of the caller, who has all of it back."""
    values = {key: noise(nbytes, number) for number, key in enumerate(_SEVERAL)}
    into = [zeros(nbytes) for _ in values]
    await ground.client.put_many(values.items())

    async def get() -> None:
        try:
            found = await ground.client.get_many(_SEVERAL, into)
            for value, expected in zip(found, values.values(), strict=True):
                expect_same(value, expected)
        finally:
            for place in into:
                place.fill_(OVERWRITE)

    async for cancel in sweeper.sweep():
        await cancel(get)
        for place in into:
            place.fill_(OVERWRITE)
        for key, value in values.items():
            expect_same(await ground.client.get(key), value)
        await ground.check_quiet()
        for place in into:
            expect_overwritten(place)


@scenario("KVStoreBuffer.pin", sizes=_ONE_SIZE)
async def a_pin(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Holds nothing any more, wherever it was cancelled."""
    value = noise(nbytes, 7)

    async def pin() -> None:
        async with ground.client.pin(_KEYS) as found:
            expect(found == (True, False), f"pinned: {found}")
            expect_same(await ground.client.get(_KEY), value)

    async for cancel in sweeper.sweep():
        await ground.store.delete(_KEY)
        others = ground.store.statistics().used_bytes
        await ground.store.put(_KEY, value)
        await cancel(pin)
        await ground.client.delete(_KEY)
        await until(lambda: ground.store.statistics().used_bytes == others)

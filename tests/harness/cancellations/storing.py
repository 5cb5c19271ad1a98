"""Values by name: the old one or the new one, and nothing between."""

from __future__ import annotations

import itertools
from typing import Final

import torch

from asynckv.abc import StoredValue
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_same, is_same, noise
from asynckv.types import TensorSpec
from harness.cancellations.entries import OVERWRITE, SMALL, expect_overwritten
from harness.cancellations.grounds import BUFFER_BYTES, Ground
from harness.cancellations.partners import Partner
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper

__all__ = (
    "STORING",
    "a_clear",
    "a_contains",
    "a_delete",
    "a_get",
    "a_match_prefix",
    "a_pin",
    "a_put",
    "a_put_that_waits_for_room",
    "a_stat",
    "many_gets",
    "many_puts",
)

_KEY: Final = "key"
_FILLER: Final = TensorSpec((BUFFER_BYTES - 64,), "uint8")


async def a_put(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """In place of another value, which is there until the new one is."""
    numbers = itertools.count()
    source = torch.zeros(nbytes, dtype=torch.uint8)
    old = new = source

    async def before() -> None:
        nonlocal old, new
        old, new = noise(nbytes, next(numbers) % 50), noise(nbytes, 60)
        source.copy_(new)
        await ground.store.put(_KEY, old)

    async def put() -> None:
        try:
            await ground.client.put(_KEY, source)
        finally:
            source.fill_(OVERWRITE)

    async def check(outcome: Outcome[None]) -> None:
        source.fill_(OVERWRITE)
        value = await ground.client.get(_KEY)
        if not outcome.cancelled or not is_same(value, old):
            expect_same(value, new)
        if ground.is_local and outcome.cancelled:
            expect_same(value, old)
        await ground.check_quiet()

    await sweeper.sweep(f"a put of {nbytes} bytes", put, check, before)


async def a_put_that_waits_for_room(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """Until another put gives its room back, soon or in that very tick."""
    new = noise(nbytes, 1)
    partner: Partner

    async def before() -> None:
        nonlocal partner
        for key in (_KEY, "other"):
            await ground.store.delete(key)
        filler = await ground.store.values.reserve("filler", _FILLER, None)

        async def free() -> None:
            ground.store.values.discard(filler)

        partner = Partner(
            sweeper, lambda: ground.store.statistics().waiting_puts > 0, free
        )

    async def check(outcome: Outcome[None]) -> None:
        await partner.ended()
        value = await ground.client.get(_KEY)
        expect(outcome.cancelled or value is not None, "it was stored")
        if value is not None:
            expect_same(value, new)
        await ground.client.put("other", new)  # there is room again
        await ground.check_quiet()

    await sweeper.sweep(
        f"a put of {nbytes} bytes that waits",
        lambda: ground.client.put(_KEY, new),
        check,
        before,
    )


async def a_get(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into memory of the caller, who has it back."""
    value = noise(nbytes, 3)
    into = torch.zeros(nbytes, dtype=torch.uint8)
    await ground.client.put(_KEY, value)

    async def get() -> None:
        into.zero_()
        try:
            expect_same(await ground.client.get(_KEY, into=into), value)
        finally:
            into.fill_(OVERWRITE)

    async def check(outcome: Outcome[None]) -> None:
        into.fill_(OVERWRITE)
        expect_same(await ground.client.get(_KEY), value)
        await ground.check_quiet()
        expect_overwritten(into)

    await sweeper.sweep(f"a get of {nbytes} bytes", get, check)


async def a_delete(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Forgets the key or does not; by ``put(key, None)`` too."""
    value = noise(nbytes, 4)

    async def before() -> None:
        await ground.store.put(_KEY, value)

    async def check(outcome: Outcome[bool | None]) -> None:
        found = await ground.client.get(_KEY)
        expect(outcome.cancelled or found is None, "it was forgotten")
        if found is not None:
            expect_same(found, value)
        await ground.check_quiet()

    await sweeper.sweep("a delete", lambda: ground.client.delete(_KEY), check, before)
    await sweeper.sweep(
        "a put of None", lambda: ground.client.put(_KEY, None), check, before
    )


async def a_clear(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Forgets all keys or does not."""
    value = noise(nbytes, 9)

    async def before() -> None:
        for key in (_KEY, "other"):
            await ground.store.put(key, value)

    async def check(outcome: Outcome[int]) -> None:
        found = await ground.client.contains([_KEY, "other"])
        expect(found in ((True, True), (False, False)), f"all or none: {found}")
        expect(outcome.cancelled or not any(found), "all were forgotten")
        await ground.check_quiet()

    await sweeper.sweep("a clear", ground.client.clear, check, before)


async def a_contains(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Leaves no trace."""
    await ground.store.put(_KEY, noise(nbytes, 5))
    keys = [_KEY, "no key"]

    async def check(outcome: Outcome[tuple[bool, ...]]) -> None:
        found = outcome.value or await ground.client.contains(keys)
        expect(found == (True, False), f"contains: {found}")
        await ground.check_quiet()

    await sweeper.sweep("a contains", lambda: ground.client.contains(keys), check)


async def a_match_prefix(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Leaves no trace."""
    await ground.store.put(_KEY, noise(nbytes, 6))
    keys = [_KEY, "no key"]

    async def check(outcome: Outcome[int]) -> None:
        expect(outcome.cancelled or outcome.value == 1, f"a prefix: {outcome}")
        await ground.check_quiet()

    await sweeper.sweep(
        "a match_prefix", lambda: ground.client.match_prefix(keys), check
    )


async def a_stat(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Leaves no trace."""
    await ground.store.put(_KEY, noise(nbytes, 8))

    async def check(outcome: Outcome[StoredValue | None]) -> None:
        expect(outcome.cancelled or outcome.value is not None, "it is there")
        await ground.check_quiet()

    await sweeper.sweep("a stat", lambda: ground.client.stat(_KEY), check)


async def many_puts(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Each stores all or nothing, and none reads its tensor any more."""
    sources = {f"key {number}": noise(nbytes, number) for number in range(3)}
    expected = {key: source.clone() for key, source in sources.items()}

    async def before() -> None:
        for key, source in sources.items():
            await ground.store.delete(key)
            source.copy_(expected[key])

    async def put() -> tuple[bool, ...]:
        try:
            return await ground.client.put_many(sources.items())
        finally:
            for source in sources.values():
                source.fill_(OVERWRITE)

    async def check(outcome: Outcome[tuple[bool, ...]]) -> None:
        for key, value in expected.items():
            found = await ground.client.get(key)
            expect(outcome.cancelled or found is not None, "it was stored")
            if found is not None:
                expect_same(found, value)
        await ground.check_quiet()

    await sweeper.sweep("puts of several values", put, check, before)


async def many_gets(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into memory of the caller, who has all of it back."""
    values = [noise(nbytes, number) for number in range(3)]
    into = [torch.zeros_like(value) for value in values]
    keys = [f"key {number}" for number in range(3)]
    await ground.client.put_many(zip(keys, values, strict=True))

    async def get() -> None:
        try:
            found = await ground.client.get_many(keys, into)
            for value, expected in zip(found, values, strict=True):
                expect_same(value, expected)
        finally:
            for place in into:
                place.fill_(OVERWRITE)

    async def check(outcome: Outcome[None]) -> None:
        for place in into:
            place.fill_(OVERWRITE)
        for key, value in zip(keys, values, strict=True):
            expect_same(await ground.client.get(key), value)
        await ground.check_quiet()
        for place in into:
            expect_overwritten(place)

    await sweeper.sweep("gets of several values", get, check)


async def a_pin(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Holds nothing any more, wherever it was cancelled."""
    value, others = noise(nbytes, 7), 0

    async def before() -> None:
        nonlocal others
        await ground.store.delete(_KEY)
        others = ground.store.statistics().used_bytes
        await ground.store.put(_KEY, value)

    async def pin() -> None:
        async with ground.client.pin([_KEY, "no key"]) as found:
            expect(found == (True, False), f"pinned: {found}")
            expect_same(await ground.client.get(_KEY), value)

    async def check(outcome: Outcome[None]) -> None:
        await ground.client.delete(_KEY)
        await until(lambda: ground.store.statistics().used_bytes == others)
        await ground.check_quiet()

    await sweeper.sweep("a pin", pin, check, before)


STORING: Final = (
    Scenario(a_put, ("KVStoreBuffer.put",)),
    Scenario(a_put_that_waits_for_room, ("KVStoreBuffer.put",)),
    Scenario(a_get, ("KVStoreBuffer.get",)),
    Scenario(a_delete, ("KVStoreBuffer.delete", "KVStoreBuffer.put"), sizes=(SMALL,)),
    Scenario(a_clear, ("KVStoreBuffer.clear",), sizes=(SMALL,)),
    Scenario(a_contains, ("KVStoreBuffer.contains",), sizes=(SMALL,)),
    Scenario(a_match_prefix, ("KVStoreBuffer.match_prefix",), sizes=(SMALL,)),
    Scenario(a_stat, ("KVStoreBuffer.stat",), sizes=(SMALL,)),
    Scenario(many_puts, ("KVStoreBuffer.put_many",)),
    Scenario(many_gets, ("KVStoreBuffer.get_many",)),
    Scenario(a_pin, ("KVStoreBuffer.pin",), sizes=(SMALL,)),
)

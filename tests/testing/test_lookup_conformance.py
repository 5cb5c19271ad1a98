from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.roles import LookupByRole
from asynckv.testing.lookup_checks.values import LOOKUP_MAX_BYTES
from asynckv.testing.lookup_conformance import LOOKUP_CHECKS, check_lookup_buffer

Trio = tuple[LookupBuffer, LookupBuffer, LookupBuffer]
RoleTrio = tuple[KVLookupBuffer, KVLookupBuffer, LookupBuffer]


@asynccontextmanager
async def local_trio() -> AsyncIterator[Trio]:
    async with LookupBuffer(LOOKUP_MAX_BYTES, drain_s=0) as buffer:
        yield buffer, buffer, buffer


@asynccontextmanager
async def trio_by_role() -> AsyncIterator[
    tuple[KVLookupBuffer, KVLookupBuffer, LookupBuffer]
]:
    async with LookupBuffer(LOOKUP_MAX_BYTES, drain_s=0) as buffer:
        yield LookupByRole(buffer, buffer), LookupByRole(buffer, buffer), buffer


@asynccontextmanager
async def smaller_trio() -> AsyncIterator[Trio]:
    async with LookupBuffer(64, drain_s=0) as buffer:
        yield buffer, buffer, buffer


async def test_the_local_buffer_passes_every_check() -> None:
    await check_lookup_buffer(local_trio)


async def test_so_does_the_one_that_a_node_hands_out() -> None:
    await check_lookup_buffer(trio_by_role)


async def test_a_failure_names_the_check() -> None:
    with pytest.raises(Exception, match=r"room|fit") as caught:
        await check_lookup_buffer(smaller_trio)
    assert caught.value.__notes__ == ["in an_entry_comes_back_as_it_was_inserted"]


def test_every_check_has_a_name_and_says_what_it_is_for() -> None:
    names = [check.__name__ for check in LOOKUP_CHECKS]
    assert len(set(names)) == len(names) > 30
    assert all(check.__doc__ for check in LOOKUP_CHECKS)

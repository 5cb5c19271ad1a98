from __future__ import annotations

from typing import cast

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.lookup_checks.values import LookupCheck
from asynckv.testing.lookup_conformance import LOOKUP_CHECKS
from asynckv.testing.pairs import (
    SCHEMES,
    Scheme,
    new_url,
    open_lookup_pair,
    open_peers,
    open_store_pair,
)
from asynckv.testing.store_checks.values import StoreCheck
from asynckv.testing.store_conformance import STORE_CHECKS

# The whole suite on uvloop too would take long: there, over tcp alone.
ON_UVLOOP = pytest.mark.both_loops
# What differs from tcp is how a link is dialled: other tests do that.
BY_UNIX = pytest.param("unix", marks=pytest.mark.chaos)


@ON_UVLOOP
@pytest.mark.parametrize("check", LOOKUP_CHECKS, ids=lambda check: check.__name__)
async def test_a_lookup_buffer_over_tcp_keeps(check: LookupCheck) -> None:
    async with open_lookup_pair("tcp") as (producer, consumer, local):
        await check(producer, consumer, local)


@ON_UVLOOP
@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_a_store_buffer_over_tcp_keeps(check: StoreCheck) -> None:
    async with open_store_pair("tcp") as (client, local):
        await check(client, local)


@pytest.mark.parametrize("scheme", [BY_UNIX, "mem", "map"])
@pytest.mark.parametrize("check", LOOKUP_CHECKS, ids=lambda check: check.__name__)
async def test_a_remote_lookup_buffer_keeps(check: LookupCheck, scheme: Scheme) -> None:
    async with open_lookup_pair(scheme) as (producer, consumer, local):
        await check(producer, consumer, local)


@pytest.mark.parametrize("scheme", [BY_UNIX, "mem"])
@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_a_remote_store_buffer_keeps(check: StoreCheck, scheme: Scheme) -> None:
    async with open_store_pair(scheme) as (client, local):
        await check(client, local)


@ON_UVLOOP
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_two_peers_reach_one_buffer(scheme: Scheme) -> None:
    async with (
        LookupBuffer("1MiB", drain_s=0) as local,
        open_peers(scheme, local) as (server, producer, consumer),
    ):
        assert server.url.startswith(f"{scheme}://")
        await producer.lookup.insert([1], None, torch.ones(3), None, None)
        assert (await consumer.lookup.drop_select([1])).nbytes == 20


async def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="none of tcp, unix, mem"):
        new_url(cast(Scheme, "ftp"))

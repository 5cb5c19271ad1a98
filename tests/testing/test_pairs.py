from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest
import torch

import asynckv
from asynckv.abc import PayloadTransport
from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import PeerLost
from asynckv.testing import until, until_blocked, use_across_tasks
from asynckv.testing.lookup_checks.values import LookupCheck
from asynckv.testing.lookup_conformance import LOOKUP_CHECKS
from asynckv.testing.pairs import (
    SCHEMES,
    TRANSPORT_KINDS,
    KVPair,
    Scheme,
    TransportKind,
    free_port,
    new_url,
    open_group,
    open_kv_faults,
    open_kv_pair,
    open_lookup_pair,
    open_peers,
    open_store_pair,
    open_transport_pair,
)
from asynckv.testing.store_checks import STORE_CHECKS, StoreCheck

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


async def hand_over(pair: KVPair) -> None:
    """One entry from here to the peer, and one tensor back."""
    await pair.lookup.insert([1, 2], None, torch.ones(3), None, None)
    async with pair.peer.lookup.drop_select([1, 2]) as entry:
        assert entry.matched_tokens == 2
    await pair.peer.store.put("name", torch.ones(2))
    assert (await pair.store.contains(["name"])) == (True,)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_pair_is_served_and_connected(scheme: Scheme) -> None:
    async with open_kv_pair(scheme, fingerprint=None) as pair:
        assert pair.server.url.startswith(f"{scheme}://")
        await hand_over(pair)


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_a_pair_with_faults_is_one(scheme: Scheme) -> None:
    async with open_kv_faults(scheme) as pair:
        with pair.tiny_slices(100) as fault:
            await hand_over(pair)
        assert fault.counts.acts > 2
        async with asynckv.connect(pair.url):
            assert pair.proxy.counts.control == 2


async def test_a_silent_side_is_noticed_within_a_second() -> None:
    async with asyncio.timeout(5), open_kv_faults(reconnect_s=0) as pair:
        with pair.black_hole():
            with pytest.raises(asynckv.PeerLost):
                await pair.peer.lookup.drop_select([1])


async def test_a_pair_is_left_in_another_task() -> None:
    await use_across_tasks(open_kv_pair("tcp"), hand_over)
    await use_across_tasks(open_kv_faults(), hand_over)


async def test_a_pair_is_left_quickly_in_the_midst_of_a_fault() -> None:
    async with asyncio.timeout(5):
        async with open_kv_faults() as pair:
            pair.black_hole().begin()
            waiting = asyncio.create_task(pair.peer.lookup.peek([1]))
            await asyncio.wait({waiting}, timeout=0.01)
        with pytest.raises(asynckv.PeerLost):
            await waiting


def test_a_free_port_can_be_listened_at() -> None:
    socket.create_server(("127.0.0.1", free_port())).close()


async def test_the_ranks_of_a_group_come_in_order() -> None:
    async with open_group(3) as groups:
        assert [group.rank for group in groups] == [0, 1, 2]


@pytest.mark.parametrize("kind", TRANSPORT_KINDS)
async def test_the_side_that_is_left_hears_of_it(kind: TransportKind) -> None:
    lost: list[list[Exception]] = [[], []]
    opening = open_transport_pair(kind, lost[0].append, lost[1].append)
    async with opening as (near, far):
        target = bytearray(4)
        far.receive(1, 0, memoryview(target), lambda *_: None)
        near.abort()
        await until(lambda: bool(lost[1]))
    assert lost[0] == []
    assert [type(error) for error in lost[1]] == [PeerLost]


async def test_both_ends_close_though_the_wait_for_the_first_is_cancelled() -> None:
    opened: list[PayloadTransport] = []
    told: list[BaseException | None] = []

    async def use() -> None:
        opening = open_transport_pair("unix", lambda _: None, lambda _: None)
        async with opening as (near, far):
            opened.append(far)
            # Nobody takes it, so the end of the near side waits for it.
            near.send(1, 0, memoryview(bytes(2**24)), lambda *_: None)

    task = asyncio.create_task(use())
    await until(lambda: bool(opened))
    await until_blocked(task)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    opened[0].receive(1, 0, memoryview(bytearray(4)), lambda _, exc: told.append(exc))
    await until(lambda: bool(told))
    assert [type(error) for error in told] == [PeerLost]

"""Each kit of checks runs them all, finds what is broken, and names its check."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from asynckv.abc import KVLookupBuffer, KVPipe, PayloadTransport
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.roles import LookupByRole
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import EntryTooLarge
from asynckv.pipes.pipe import Pipe
from asynckv.security.tls import TlsKeys, read_tls
from asynckv.security.tls_socket import TlsSocket
from asynckv.testing import (
    lookup_conformance,
    pipe_checks,
    store_checks,
    tier_checks,
    transport_conformance,
)
from asynckv.testing.certificates import Authority
from asynckv.testing.lookup_checks.values import LOOKUP_MAX_BYTES
from asynckv.testing.lookup_conformance import LOOKUP_CHECKS, check_lookup_buffer
from asynckv.testing.pairs import (
    SCHEMES,
    Scheme,
    open_pipe_pair,
    open_transport_pair,
)
from asynckv.testing.pipe_checks import PIPE_CHECKS, PipeCheck, check_pipe
from asynckv.testing.store_checks import (
    STORE_CHECKS,
    StoreCheck,
    check_store_buffer,
)
from asynckv.testing.tier_checks import TIER_CHECKS, OpenTier, TierCheck, check_tier
from asynckv.testing.transport_checks.sides import (
    LostCallback,
    MakeTransportPair,
    TransportCheck,
)
from asynckv.testing.transport_conformance import TRANSPORT_CHECKS, check_transport
from asynckv.transports.inline import InlineTransport
from asynckv.transports.mem import MemTransport
from harness.tiers import DictTier


@contextlib.asynccontextmanager
async def smaller_trio() -> AsyncIterator[tuple[LookupBuffer, ...]]:
    async with LookupBuffer(64, drain_s=0) as buffer:
        yield buffer, buffer, buffer


@contextlib.asynccontextmanager
async def trio_by_role() -> AsyncIterator[
    tuple[KVLookupBuffer, KVLookupBuffer, LookupBuffer]
]:
    async with LookupBuffer(LOOKUP_MAX_BYTES, drain_s=0) as buffer:
        yield LookupByRole(buffer, buffer), LookupByRole(buffer, buffer), buffer


class Flattening(StoreBuffer):
    """Gives back another shape than was put."""

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        value = await super().get(key, into)
        return None if value is None else value.flatten()


@contextlib.asynccontextmanager
async def local_pair(
    kind: type[StoreBuffer] = StoreBuffer,
) -> AsyncIterator[tuple[StoreBuffer, StoreBuffer]]:
    async with kind("16MiB") as buffer:
        yield buffer, buffer


class Squaring(Pipe):
    """Gives back something else than was sent."""

    async def recv_tensor(
        self, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        tensor = await super().recv_tensor(into)
        return None if tensor is None else tensor.flatten()


@contextlib.asynccontextmanager
async def broken_pipes() -> AsyncIterator[tuple[KVPipe, KVPipe]]:
    async with open_pipe_pair("mem") as (near, far):
        far.__class__ = Squaring
        yield near, far


class Forgetful(MemTransport):
    """Tells nobody of what it sent."""

    def send(self, *args: Any, **options: Any) -> None:
        transfer, part, source, _ = args
        super().send(transfer, part, source, lambda *_: None, **options)


@contextlib.asynccontextmanager
async def broken_transports(
    near_lost: LostCallback, far_lost: LostCallback, *, digest: bool
) -> AsyncIterator[tuple[PayloadTransport, PayloadTransport]]:
    opening = open_transport_pair("mem", near_lost, far_lost, digest=digest)
    async with opening as (near, far):
        near.__class__ = Forgetful
        yield near, far


@contextlib.asynccontextmanager
async def dict_tiers(*, flips_bits: bool = False) -> AsyncIterator[OpenTier]:
    values: dict[str, bytes] = {}

    def make() -> DictTier:
        tier = DictTier(values)
        tier.flips_bits = flips_bits
        return tier

    yield make


@dataclasses.dataclass(frozen=True)
class Kit:
    """Checks, what runs them all, what keeps them, and what breaks one of them."""

    module: ModuleType
    checks: str
    run: Callable[[Any], Awaitable[None]]
    kept: Any
    broken: Any
    error: type[Exception]
    match: str | None
    note: str


KITS = {
    "lookup": Kit(
        lookup_conformance,
        "LOOKUP_CHECKS",
        check_lookup_buffer,
        kept=trio_by_role,
        broken=smaller_trio,
        error=EntryTooLarge,
        match="room|fit",
        note="in an_entry_comes_back_as_it_was_inserted",
    ),
    "store": Kit(
        store_checks,
        "STORE_CHECKS",
        check_store_buffer,
        kept=local_pair,
        broken=partial(local_pair, Flattening),
        error=AssertionError,
        match="expected a",
        note="in a_value_comes_back_as_it_was_put",
    ),
    "pipe": Kit(
        pipe_checks,
        "PIPE_CHECKS",
        check_pipe,
        kept=partial(open_pipe_pair, "mem"),
        broken=broken_pipes,
        error=AssertionError,
        match="expected a",
        note="in a_tensor_comes_back_as_it_was_sent",
    ),
    "transport": Kit(
        transport_conformance,
        "TRANSPORT_CHECKS",
        check_transport,
        kept=partial(open_transport_pair, "mem"),
        broken=broken_transports,
        error=TimeoutError,
        match=None,
        note="in bytes_of_any_size_land",
    ),
    "tier": Kit(
        tier_checks,
        "TIER_CHECKS",
        check_tier,
        kept=dict_tiers,
        broken=partial(dict_tiers, flips_bits=True),
        error=AssertionError,
        match="are not those stored",
        note="in a_value_comes_back_as_it_was_stored",
    ),
}
each_kit = pytest.mark.parametrize("kit", KITS.values(), ids=KITS)


@pytest.mark.both_loops
@each_kit
async def test_what_breaks_the_contract_is_found_and_the_check_named(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckv.testing.transport_checks.sides._TIMEOUT_S", 0.1)
    with pytest.raises(kit.error, match=kit.match) as caught:
        await kit.run(kit.broken)
    assert caught.value.__notes__ == [kit.note]


@pytest.mark.both_loops
@each_kit
async def test_all_checks_run_as_one(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []

    async def note(*given: object) -> None:
        ran.append(given)

    monkeypatch.setattr(kit.module, kit.checks, [note, note])
    await kit.run(kit.kept)
    assert len(ran) == 2 and all(ran)


@pytest.mark.parametrize(
    ("checks", "at_least"),
    [
        (LOOKUP_CHECKS, 31),
        (STORE_CHECKS, 14),
        (PIPE_CHECKS, 20),
        (TRANSPORT_CHECKS, 26),
        (TIER_CHECKS, 12),
    ],
    ids=KITS,
)
def test_every_check_has_a_name_and_says_what_it_is_for(
    checks: Sequence[Any], at_least: int
) -> None:
    names = [check.__name__ for check in checks]
    assert len(set(names)) == len(names) >= at_least
    assert all(check.__doc__ for check in checks)


async def test_the_lookup_buffer_that_a_node_hands_out_keeps_them_all() -> None:
    await check_lookup_buffer(trio_by_role)


@pytest.mark.parametrize("check", TIER_CHECKS, ids=lambda check: check.__name__)
async def test_a_tier_that_shows_each_value_whole_keeps(check: TierCheck) -> None:
    async with dict_tiers() as make:
        await check(make)


@pytest.mark.both_loops
@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_a_local_store_buffer_keeps(check: StoreCheck) -> None:
    async with local_pair() as (client, local):
        await check(client, local)


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("check", PIPE_CHECKS, ids=lambda check: check.__name__)
async def test_a_pipe_keeps(check: PipeCheck, scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        await check(near, far)


@pytest.mark.both_loops
@pytest.mark.parametrize("check", PIPE_CHECKS, ids=lambda check: check.__name__)
async def test_the_side_that_accepted_keeps(check: PipeCheck) -> None:
    async with open_pipe_pair("unix") as (near, far):
        await check(far, near)


def shaken(keys: TlsKeys) -> tuple[TlsSocket, TlsSocket]:
    one, other = socket.socketpair()
    ends = TlsSocket.over(one, keys, dials="localhost"), TlsSocket.over(other, keys)
    waiting = list(ends)
    while waiting:
        for end in list(waiting):
            with contextlib.suppress(BlockingIOError):
                end.shake_hands()
                waiting.remove(end)
    return ends


@pytest.fixture
def open_tls_pair(authority: Authority) -> MakeTransportPair:
    @contextlib.asynccontextmanager
    async def open_pair(
        near_lost: LostCallback, far_lost: LostCallback, *, digest: bool
    ) -> AsyncIterator[tuple[PayloadTransport, PayloadTransport]]:
        loop, lanes = asyncio.get_running_loop(), [shaken(keys) for _ in range(2)]
        near = InlineTransport(2, digest, loop, near_lost)
        far = InlineTransport(2, digest, loop, far_lost)
        await near.open(b"", [lane[0] for lane in lanes])
        await far.open(b"", [lane[1] for lane in lanes])
        try:
            yield near, far
        finally:
            await near.aclose()
            await far.aclose()

    keys = read_tls(authority.issue())
    return open_pair


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
async def test_lanes_over_tls_keep(
    check: TransportCheck, open_tls_pair: MakeTransportPair
) -> None:
    await check(open_tls_pair)

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from functools import partial

import pytest

from asynckv.abc import PayloadTransport
from asynckv.security.tls import TlsKeys, read_tls
from asynckv.security.tls_socket import TlsSocket
from asynckv.tensors.runs import Memory
from asynckv.testing import transport_conformance
from asynckv.testing.certificates import Authority
from asynckv.testing.pairs import open_transport_pair
from asynckv.testing.transport_checks.moving import MOVING_CHECKS
from asynckv.testing.transport_checks.sides import (
    LostCallback,
    MakeTransportPair,
    TransportCheck,
)
from asynckv.testing.transport_conformance import TRANSPORT_CHECKS, check_transport
from asynckv.transports.inline import InlineTransport
from asynckv.transports.mem import MemTransport
from asynckv.transports.parts import DoneCallback


class Forgetful(MemTransport):
    """Tells nobody of what it sent."""

    def send(
        self,
        transfer: int,
        part: int,
        source: Memory,
        done: DoneCallback,
        *,
        digest: bytes | None = None,
    ) -> None:
        super().send(transfer, part, source, lambda *_: None, digest=digest)


@contextlib.asynccontextmanager
async def broken_pair(
    near_lost: LostCallback, far_lost: LostCallback, *, digest: bool
) -> AsyncIterator[tuple[PayloadTransport, PayloadTransport]]:
    opening = open_transport_pair("mem", near_lost, far_lost, digest=digest)
    async with opening as (near, far):
        near.__class__ = Forgetful
        yield near, far


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


async def test_all_checks_run_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[MakeTransportPair] = []

    async def note(make_pair: MakeTransportPair) -> None:
        ran.append(make_pair)

    checks = [*MOVING_CHECKS, note, note]
    monkeypatch.setattr(transport_conformance, "TRANSPORT_CHECKS", checks)
    make_pair = partial(open_transport_pair, "mem")
    await check_transport(make_pair)
    assert ran == [make_pair, make_pair]


async def test_a_transport_that_breaks_the_contract_is_found_and_the_check_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asynckv.testing.transport_checks.sides._TIMEOUT_S", 0.1)
    with pytest.raises(TimeoutError) as caught:
        await check_transport(broken_pair)
    assert caught.value.__notes__ == ["in bytes_of_any_size_land"]


def test_every_check_has_a_name_and_says_what_it_is_for() -> None:
    names = [check.__name__ for check in TRANSPORT_CHECKS]
    assert len(set(names)) == len(names) > 25
    assert all(check.__doc__ for check in TRANSPORT_CHECKS)

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from asynckv.abc import PayloadTransport
from asynckv.testing.nccl_pairs import open_nccl_pair
from asynckv.testing.transport_checks.sides import TransportCheck
from asynckv.testing.transport_conformance import TRANSPORT_CHECKS


@contextlib.asynccontextmanager
async def open_pair(
    near_lost: Callable[[Exception], None],
    far_lost: Callable[[Exception], None],
    *,
    digest: bool = True,
) -> AsyncIterator[tuple[PayloadTransport, PayloadTransport]]:
    async with open_nccl_pair(near_lost, far_lost, digest=digest) as pair:
        yield pair


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract_of_transports(check: TransportCheck) -> None:
    await check(open_pair)

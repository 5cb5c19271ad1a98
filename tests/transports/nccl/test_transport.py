from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from asynckv.abc import PayloadTransport
from asynckv.testing.transport_checks.sides import TransportCheck
from asynckv.testing.transport_conformance import TRANSPORT_CHECKS
from harness.nccl_pairs import open_nccl_pair


@contextlib.asynccontextmanager
async def open_pair(
    near_lost: Callable[[Exception], None],
    far_lost: Callable[[Exception], None],
    *,
    digest: bool = True,
) -> AsyncIterator[tuple[PayloadTransport, PayloadTransport]]:
    async with open_nccl_pair(near_lost, far_lost, digest=digest) as pair:
        yield pair


LONG = {
    "a_cancelled_close_has_closed",
    "a_quiet_source_may_be_overwritten",
    "a_quiet_target_is_not_written_to",
    "an_abort_ends_everything_once_and_soon",
    "both_directions_move_at_once",
    "both_sides_may_stop_at_once",
    "bytes_of_any_size_land",
    "many_transfers_move_at_once",
    "memory_is_quiet_when_an_error_is_told",
    "nothing_is_left_behind",
    "parts_land_in_their_own_memory_in_any_order",
}
CHECKS = [
    pytest.param(
        check,
        id=check.__name__,
        marks=[pytest.mark.trust] if check.__name__ in LONG else [],
    )
    for check in TRANSPORT_CHECKS
]


@pytest.mark.parametrize("check", CHECKS)
async def test_it_keeps_the_contract_of_transports(check: TransportCheck) -> None:
    await check(open_pair)


def test_what_is_put_off_as_long_is_there() -> None:
    assert {check.__name__ for check in TRANSPORT_CHECKS} >= LONG

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.connectors.p2p.loading import P2PLoading
from asynckv.connectors.requests import LoadOrder
from asynckv.testing.blocked import until
from harness.engines.toy_parts import ToyParts, open_toy_parts

ORDER = LoadOrder("r", "t", "P", ((1, 2),), is_async=False)


@pytest.fixture
async def parts() -> AsyncIterator[ToyParts]:
    async with open_toy_parts("D") as parts:
        yield parts


@pytest.fixture
def loading(parts: ToyParts) -> P2PLoading:
    return P2PLoading(*parts.all, moves=parts.moves)


async def test_a_load_that_cannot_begin_fails_and_nothing_is_raised(
    loading: P2PLoading, parts: ToyParts
) -> None:
    parts.registered = None
    loading.begin(ORDER)
    results = parts.transfers.results()
    assert results.failed_recving == {"r"}
    assert results.invalid_block_ids == {1, 2}
    assert loading.awaited == ()


async def test_a_step_waits_for_its_loads_until_it_is_over(
    loading: P2PLoading, parts: ToyParts
) -> None:
    loading.begin(ORDER)
    assert [load.order for load in loading.awaited] == [ORDER]
    loading.clear()
    assert loading.awaited == ()
    assert parts.transfers.count("recv") == 1


async def test_what_nobody_loads_is_released_beside_the_loads(
    loading: P2PLoading, parts: ToyParts
) -> None:
    loading.begin(LoadOrder("r", "t", "P", ()))
    assert (parts.transfers.count("recv"), parts.transfers.others) == (0, 1)
    await until(lambda: not parts.transfers.others)  # nobody serves there


async def test_a_request_is_loaded_once_at_a_time(
    loading: P2PLoading, parts: ToyParts
) -> None:
    for _ in range(2):
        loading.begin(ORDER)
    assert len(loading.awaited) == 1
    assert parts.transfers.count("recv") == 1


async def test_a_load_fails_with_the_rank_that_it_is_from_and_no_other(
    parts: ToyParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Callable[[str], None]] = []
    monkeypatch.setattr(parts.routes, "call_when_lost", told.append)
    loading = P2PLoading(*parts.all, moves=parts.moves)
    async with serve("mem://toy-parts-P", lookup=LookupBuffer(), identity="P/0"):
        loading.begin(ORDER)
        await until(lambda: all(load.has_begun for load in loading.awaited))
        for lost in ("Q/0", "P/1"):
            told[0](lost)
            assert not parts.transfers.results().failed_recving
        told[0]("P/0")
        await until(lambda: not parts.transfers.count("recv"))
        results = parts.transfers.results()
        assert results.failed_recving == {"r"} and "P/0 is gone" in results.reasons["r"]
        await parts.transfers.aclose()
        await parts.routes.peers.aclose()

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.connectors.p2p_orders import SaveOrder
from asynckv.connectors.p2p_saving import P2PSaving
from asynckv.connectors.staging import Staging
from asynckv.errors import GPUFailed
from asynckv.testing.engines.toy_parts import ToyParts, open_toy_parts

ORDER = SaveOrder("r", "t", "D", (1, 2, 3), ((1,),))


@pytest.fixture
async def parts() -> AsyncIterator[ToyParts]:
    async with open_toy_parts("P") as parts:
        yield parts


@pytest.fixture
def saving(parts: ToyParts) -> P2PSaving:
    return P2PSaving(*parts.all, moves=parts.moves, staging=Staging(2**20))


async def test_where_nothing_is_saved_the_stream_is_not_asked(
    saving: P2PSaving, parts: ToyParts
) -> None:
    saving.offer("a")
    await saving.begin_to_wait()
    assert not parts.asked


async def test_a_request_is_saved_once_at_a_time(
    saving: P2PSaving, parts: ToyParts
) -> None:
    saving.begin(ORDER)
    saving.begin(ORDER)
    assert parts.transfers.count("send") == 1
    assert parts.transfers.others == 1  # whoever waits for the second is told


async def test_saves_fail_where_a_stream_is_not_known(
    saving: P2PSaving, parts: ToyParts
) -> None:
    saving.begin(ORDER)
    parts.moves().follow(GPUFailed("it is stuck"))
    with pytest.raises(GPUFailed, match="stuck"):
        await saving.begin_to_wait()
    assert parts.transfers.results().failed_sending == {"r"}

from __future__ import annotations

import asyncio

import pytest

from asynckv.connectors.options import Direction
from asynckv.connectors.requests import P2PMetadata
from harness.cancellations import quiet
from harness.cancellations.connectors import grounds
from harness.cancellations.connectors.grounds import (
    has_let_go,
    open_p2p,
    urls_of,
)


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_what_is_left_is_told(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "_TIMEOUT_S", 0.05)
    async with open_p2p("mem", direction) as ground:
        await ground.hand_over()
        await ground.check_quiet()
        staying = asyncio.create_task(asyncio.Event().wait(), name="staying")
        with pytest.raises(AssertionError, match="task staying"):
            await ground.check_quiet()
        staying.cancel()


async def test_a_transfer_that_goes_on_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grounds, "_TIMEOUT_S", 0.2)
    async with open_p2p("mem") as ground:
        worker = ground.decode.workers[0]
        order = ground.load_order("never comes")
        worker.bind_connector_metadata(P2PMetadata(loads=(order,)))
        await worker.start_load_kv()
        with pytest.raises(AssertionError, match="left behind"):
            await has_let_go(worker)


def test_every_place_is_another() -> None:
    for scheme in ("mem", "tcp", "unix"):
        with urls_of(scheme, 2, 1) as (first, second):
            assert len({*first, *second}) == 3

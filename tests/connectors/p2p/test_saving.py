from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import torch

from asynckv.connectors.p2p.gpu_layers import Staging
from asynckv.connectors.p2p.saving import P2PSaving
from asynckv.connectors.requests import SaveOrder
from asynckv.errors import GPUFailed
from asynckv.testing.blocked import until, until_blocked
from harness.engines.toy_parts import ToyParts, open_toy_parts

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
    results = parts.transfers.results()
    assert results.failed_sending == {"r"} and not results.full_sending


async def fill(parts: ToyParts) -> None:
    """Serve, and leave no room for a save."""
    await parts.routes.open()
    assert parts.routes.buffer is not None
    room = parts.routes.buffer.statistics().max_bytes - 8  # its token takes some
    full = torch.zeros(room, dtype=torch.uint8)
    await parts.routes.buffer.insert([0], None, full, None, None)


async def test_blocks_that_are_held_are_left_when_the_engine_wants_them(
    parts: ToyParts,
) -> None:
    engine = msgspec.structs.replace(parts.engine, holds_saved_blocks=True)
    staging = Staging(2**20)
    saving = P2PSaving(*(engine, *parts.all[1:]), moves=parts.moves, staging=staging)
    await fill(parts)
    saving.begin(ORDER)
    waiting = asyncio.create_task(saving.begin_to_wait())
    for wanted in ({"another"}, set[str]()):
        await until_blocked(waiting)
        saving.let_go_of_blocks(wanted)
    await until_blocked(waiting)
    assert not waiting.done() and staging.used_bytes == 0
    saving.let_go_of_blocks({"r"})
    await asyncio.wait_for(waiting, 10)
    assert staging.copies == 1
    parts.routes.abort()


async def test_a_save_that_nobody_wants_leaves_when_it_ends(parts: ToyParts) -> None:
    saving = P2PSaving(*parts.all, moves=parts.moves, staging=Staging(2**20))
    await parts.routes.open()
    assert parts.routes.buffer is not None
    saving.begin(ORDER)
    saving.withdraw(ORDER)
    await saving.begin_to_wait()
    await until(lambda: not parts.transfers.count("send"))
    await parts.transfers.wait_others()
    assert parts.routes.buffer.statistics().withdrawn == 1
    parts.routes.abort()


async def test_of_a_failed_save_that_nobody_wants_nobody_is_told(
    parts: ToyParts,
) -> None:
    saving = P2PSaving(*parts.all, moves=parts.moves, staging=Staging(2**20))
    saving.options = msgspec.structs.replace(parts.options, save_timeout_s=0.1)
    await fill(parts)
    saving.begin(ORDER)
    saving.withdraw(ORDER)
    await saving.begin_to_wait()
    await until(lambda: not parts.transfers.count("send"))
    await parts.transfers.wait_others()  # a notice would wait for room
    parts.routes.abort()


async def test_a_save_without_room_is_given_up_in_its_time(parts: ToyParts) -> None:
    saving = P2PSaving(*parts.all, moves=parts.moves, staging=Staging(2**20))
    saving.options = msgspec.structs.replace(parts.options, save_timeout_s=0.1)
    await fill(parts)
    saving.begin(ORDER)
    await saving.begin_to_wait()
    await until(lambda: not parts.transfers.count("send"))
    results = parts.transfers.results()
    assert results.failed_sending == results.full_sending == {"r"}
    parts.routes.abort()

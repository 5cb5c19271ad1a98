from __future__ import annotations

import asyncio

import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.blocked import until
from harness.cancellations.grounds import BUFFER_BYTES
from harness.cancellations.partners import Filler, Partner
from harness.cancellations.sweeper import Sweeper, ticks


async def test_a_partner_acts_once_the_call_has_come_so_far() -> None:
    has_come = asyncio.Event()
    partner = Partner(Sweeper(), has_come.is_set, lambda: ticks(1))
    await ticks(5)
    assert not partner.task.done()
    has_come.set()
    await until(partner.task.done)


async def test_a_partner_acts_also_if_the_call_is_over_before() -> None:
    partner = Partner(Sweeper(), lambda: False, lambda: ticks(1))
    await partner.ended()


async def test_nothing_has_room_until_the_filler_is_freed() -> None:
    async with LookupBuffer(BUFFER_BYTES, drain_s=0) as buffer:
        filler = Filler(buffer)
        await filler.fill()
        insert = asyncio.create_task(
            buffer.insert([1], None, torch.zeros(20), None, None)
        )
        await until(lambda: buffer.statistics().waiting_inserts == 1)
        await filler.free()
        await filler.free()
        await insert

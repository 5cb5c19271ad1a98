from __future__ import annotations

import asyncio

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serving.devices import DeviceService
from asynckv.buffers.serving.lookup import LookupService
from asynckv.buffers.serving.requests import LookupRequests
from asynckv.buffers.serving.service import WaitingBytes
from asynckv.links.link import Link
from asynckv.protocol.values import Limits
from asynckv.testing.blocked import until_blocked
from harness.link_pairs import linked


def requests_of(link: Link, buffer: LookupBuffer) -> LookupRequests:
    devices = DeviceService(buffer, link, "full", may_use_nccl=False)
    return LookupService(buffer, link, WaitingBytes(2**20).for_link(), devices)


async def test_they_wait_until_those_of_the_link_before_have_ended(
    local: LookupBuffer,
) -> None:
    async with linked("mem://") as pair:
        older, requests = (requests_of(pair.far, local) for _ in range(2))
        requests.predecessors = (older,)
        leaving = asyncio.Event()

        async def leave() -> None:
            await leaving.wait()

        older.run(leave(), "one that lets go late")
        waiting = asyncio.create_task(requests.after_predecessors())
        await until_blocked(waiting)
        leaving.set()
        await waiting
        assert older.has_ended and not requests.predecessors


async def test_a_peer_is_charged_up_to_its_own_bound(local: LookupBuffer) -> None:
    async with linked("mem://", near={"limits": Limits(max_receive_bytes=100)}) as pair:
        requests = requests_of(pair.far, local)
        assert requests.may_charge(100) and not requests.may_charge(101)
        requests.charge(60)
        assert requests.may_charge(40) and not requests.may_charge(41)
        requests.charge(-60)
        assert requests.may_charge(100)

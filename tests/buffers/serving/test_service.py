from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.serving.service import Service, WaitingBytes
from asynckv.errors import Overloaded
from asynckv.links.link import LinkStream
from asynckv.links.streams import StreamHandler
from asynckv.protocol.frames import OpeningFrame
from asynckv.testing.blocked import until_blocked
from harness.link_pairs import linked


class ServiceOfNothing(Service):
    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler | None:
        return None

    async def wait_idle(self) -> None:
        """Nothing is ever under way."""


async def test_what_a_task_keeps_is_given_back_at_its_end() -> None:
    async with linked("mem://") as pair:
        service, kept = ServiceOfNothing(pair.far), WaitingBytes(100).for_link().inserts
        going, begun = asyncio.Event(), list[str]()

        async def go() -> None:
            begun.append("one")
            await going.wait()

        task = service.run_kept(kept, 50, go, "one that keeps much")
        await until_blocked(task)
        with pytest.raises(Overloaded):
            service.run_kept(kept, 1, go, "one too many")
        assert begun == ["one"] and not kept.fits(1)
        going.set()
        await service.wait_ended()
        await asyncio.sleep(0)
        assert kept.fits(50) and not kept.fits(51)


async def test_each_time_that_its_last_task_has_ended_it_says_so() -> None:
    async with linked("mem://") as pair:
        service, ended = ServiceOfNothing(pair.far), list[bool]()
        service.call_when_ended(lambda: ended.append(service.has_ended))
        for _ in range(2):
            service.run(asyncio.sleep(0), "one that ends")
            service.run(asyncio.sleep(60), "one that would not")
            await asyncio.sleep(0.01)
            assert not service.has_ended
            service.abort()
            await service.wait_ended()
            await asyncio.sleep(0)
        assert ended == [True, True]

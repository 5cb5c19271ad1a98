from __future__ import annotations

import asyncio
import threading

from asynckv.transports.parts import Completions, Part


def _part() -> Part:
    return Part(1, 0, memoryview(b""), lambda *_: None, b"")


async def test_parts_are_delivered_on_the_loop_in_order() -> None:
    delivered: list[Part] = []
    threads: set[int] = set()

    def deliver(part: Part) -> None:
        delivered.append(part)
        threads.add(threading.get_ident())

    completions = Completions(asyncio.get_running_loop(), deliver)
    parts = [_part() for _ in range(1000)]

    def add_all() -> None:
        for part in parts:
            completions.add(part)

    thread = threading.Thread(target=add_all)
    thread.start()
    async with asyncio.timeout(5):
        while len(delivered) < len(parts):  # noqa: ASYNC110
            await asyncio.sleep(0)
    thread.join()
    assert delivered == parts
    assert threads == {threading.get_ident()}


async def test_one_tick_delivers_a_bounded_number() -> None:
    delivered: list[Part] = []
    completions = Completions(asyncio.get_running_loop(), delivered.append)
    for _ in range(1000):
        completions.add(_part())
    for _ in range(3):
        await asyncio.sleep(0)
    assert 0 < len(delivered) < 300
    completions.deliver_all()
    assert len(delivered) == 1000


def test_a_closed_loop_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    completions = Completions(loop, lambda _: None)
    loop.close()
    completions.add(_part())

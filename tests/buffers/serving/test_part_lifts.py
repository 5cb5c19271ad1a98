from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.serving import pushes as part_lifts
from asynckv.buffers.serving.pushes import PartLifts
from asynckv.errors import GPUFailed
from asynckv.tensors.arena import HeapArena
from asynckv.tensors.copying import CopyPool
from asynckv.testing.blocked import until
from harness.holders import draft_of


class Service:
    """In place of one: owns tasks, and a pool."""

    def __init__(self) -> None:
        self.pool = CopyPool()
        self.buffer = self

    def run(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return asyncio.create_task(work, name=name)


class Parts:
    """One entry of one part in host memory, and what is told of it."""

    def __init__(self) -> None:
        self.entry = StoredEntry(draft_of("it", (1, 2), 8), 1)
        self.regions = HeapArena(64).allocate(self.entry.draft.sizes) or []
        self.entry.place_regions(self.regions)
        self.told: list[object] = []
        self.lifts = PartLifts(
            Service(),  # type: ignore[arg-type]
            self.entry,
            lambda index, digest: self.told.append((index, digest)),
            self.told.append,
        )

    def begin(self) -> None:
        landing = self.lifts.landing(0, self.regions[0])
        self.lifts.begin(0, b"digest", landing)


async def test_a_part_is_in_when_it_was_lifted_and_known_for_good() -> None:
    parts = Parts()
    assert 0 not in parts.lifts
    parts.begin()
    await until(lambda: parts.told == [(0, b"digest")])
    assert 0 in parts.lifts


async def test_what_cannot_be_lifted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    error = GPUFailed("it has fallen off the bus")

    async def fail(*anything: object) -> None:
        raise error

    monkeypatch.setattr(part_lifts, "lift_landed", fail)
    parts = Parts()
    parts.begin()
    await until(lambda: parts.told == [error])


async def test_what_has_left_is_not_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    monkeypatch.setattr(part_lifts, "lift_landed", None)  # what calls it fails
    parts.begin()
    parts.entry.drop_regions()
    await until(lambda: parts.told == [(0, b"digest")])


async def test_what_is_cancelled_tells_nobody() -> None:
    parts = Parts()
    parts.begin()
    tasks = parts.lifts.cancel()
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [True] and not parts.told


async def test_they_work_while_one_is_on_its_way_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def lift(*anything: object) -> None:
        await gate

    monkeypatch.setattr(part_lifts, "lift_landed", lift)
    parts = Parts()
    assert not parts.lifts.are_working
    parts.begin()
    assert parts.lifts.are_working
    with monkeypatch.context() as patch:
        patch.setattr(part_lifts, "OWN_WORK_S", 0.0)
        assert not parts.lifts.are_working
    gate.set_result(None)
    await until(lambda: not parts.lifts.are_working)
    assert parts.told == [(0, b"digest")]

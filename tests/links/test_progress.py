from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from asynckv.abc import PayloadTransport
from asynckv.errors import RemoteProtocolError
from asynckv.links import progress
from asynckv.links.progress import Progress
from asynckv.testing.blocked import until


class Landing:
    """A transport as far as progress is concerned."""

    def __init__(self) -> None:
        self.nbytes: dict[int, int] = {}

    def landed_bytes(self, transfer: int) -> int:
        return self.nbytes.get(transfer, 0)


@pytest.fixture(autouse=True)
def short_stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "STALL_S", 0.02)
    return iter([None])


class Watched:
    def __init__(self) -> None:
        self.landing = Landing()
        self.errors: list[RemoteProtocolError] = []
        transport = cast(PayloadTransport, self.landing)
        self.progress = Progress(transport, self.errors.append)


async def test_bytes_that_do_not_come_are_told_once() -> None:
    watched = Watched()
    watched.progress.expect(1)
    watched.progress.expect(3)
    await until(lambda: bool(watched.errors))
    assert "stood still" in str(watched.errors[0])
    assert watched.progress._timer is None


async def test_a_byte_of_any_of_them_is_progress() -> None:
    watched = Watched()
    watched.progress.expect(1)
    watched.progress.expect(3)
    first = watched.progress._timer
    watched.landing.nbytes[3] = 1
    await until(lambda: watched.progress._timer not in (first, None))
    assert not watched.errors
    watched.progress.stop()


async def test_what_has_landed_is_not_watched() -> None:
    watched = Watched()
    watched.progress.expect(1)
    watched.progress.forget(1)
    await until(lambda: watched.progress._timer is None)
    assert not watched.errors
    watched.progress.stop()


async def test_a_loop_that_was_late_itself_does_not_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched()
    watched.progress.expect(1)
    watched.progress._due_s -= 10
    first = watched.progress._timer
    await until(lambda: watched.progress._timer not in (first, None))
    assert not watched.errors
    watched.progress.stop()


async def test_what_came_by_another_way_is_progress() -> None:
    watched = Watched()
    watched.progress.expect(1)
    timer = watched.progress._timer
    watched.progress.note(1)
    await until(lambda: watched.progress._timer is not timer)
    assert not watched.errors
    watched.progress.stop()

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from asynckv.tensors import late_views as late_views_module
from asynckv.tensors.late_views import LateViews
from asynckv.tensors.paged_arena import SlabArena, SlabRegion
from asynckv.tensors.slabs import has_slabs
from asynckv.testing.blocked import until
from asynckv.types import TensorSpec

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")


_MIB = 2**20
_LARGE = TensorSpec((_MIB,), "uint8")


class Watched:
    """An arena of one slab whose late views are counted."""

    def __init__(self) -> None:
        self.late = LateViews()
        self.arena = SlabArena(
            16 * _MIB, wanted=lambda: None, freed=lambda: None, pinned=self.late.watch
        )
        self.arena.add_slab(self.arena.pages.make_slab())

    def take(self) -> SlabRegion:
        (region,) = self.arena.allocate([_MIB]) or []
        assert isinstance(region, SlabRegion)
        return region


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(late_views_module, "LATE_S", 0.02)
    watched = Watched()
    yield watched
    watched.late.stop()
    watched.arena.close()


async def test_a_view_that_is_kept_long_is_said_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    region = watched.take()
    view = region.view()
    region.release()
    assert watched.late.count == 0
    await until(lambda: watched.late.count == 1)
    other = watched.take()
    later = other.view()
    other.release()
    await until(lambda: watched.late.count == 2)
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    assert "views of 1 tensors (1048576 bytes)" in caplog.messages[0]
    del view, later


async def test_a_view_that_is_kept_for_less_is_not_said(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_views_module, "LATE_S", 60.0)
    region = watched.take()
    view = region.view()
    region.release()
    for _ in range(3):
        await asyncio.sleep(0)
    assert watched.late.count == 0 and region in watched.late._watched
    del view


async def test_a_view_that_goes_in_time_is_not_said(watched: Watched) -> None:
    region, marker = watched.take(), watched.take()
    views = [region.view(), marker.view()]
    region.release()
    del views[0]
    marker.release()
    await until(lambda: watched.late.count == 1)
    assert not watched.late._watched
    del views


async def test_what_is_handed_out_or_was_never_inserted_is_not_late(
    watched: Watched,
) -> None:
    lent, taken, marker = watched.take(), watched.take(), watched.take()
    views = [region.view() for region in (lent, taken, marker)]
    lent.is_borrowed = True
    taken.hand_out()
    for region in (lent, taken, marker):
        region.release()
    assert [*watched.late._watched] == [marker]
    del views


async def test_what_has_an_owner_again_begins_anew(watched: Watched) -> None:
    region = watched.take()
    view = region.view()
    region.release()
    first = watched.late._watched[region]
    assert region.own()
    await asyncio.sleep(0)
    region.release()
    assert watched.late._watched[region] >= first
    await until(lambda: watched.late.count == 1)
    assert not watched.late._watched
    del view


async def test_nothing_is_watched_any_more_once_it_was_stopped(
    watched: Watched,
) -> None:
    regions = [watched.take(), watched.take()]
    views = [region.view() for region in regions]
    regions[0].release()
    watched.late.stop()
    regions[1].release()
    assert not watched.late._watched
    assert watched.late._timer is None
    del views


def test_without_a_loop_nothing_is_watched(watched: Watched) -> None:
    region = watched.take()
    view = region.view()
    region.release()
    assert not watched.late._watched
    del view

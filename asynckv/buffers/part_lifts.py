"""Pushed parts that have landed in host memory, on their way to the entry's GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from asynckv.buffers.entries.entries import StoredEntry
from asynckv.buffers.part_landing import PartLanding, lift_landed
from asynckv.links.progress import OWN_WORK_S
from asynckv.tensors.arena import Region

if TYPE_CHECKING:
    from asynckv.buffers.serve_lookup import LookupService

__all__ = ("PartLifts",)


class PartLifts:
    """Those of one ``entry``; one that was begun is known here for good.

    ``is_in(index, digest)`` is called when a part is on the GPU, or is not needed any
    more, ``failed`` with why it is not there.
    """

    def __init__(
        self,
        service: LookupService,
        entry: StoredEntry,
        is_in: Callable[[int, bytes], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._service = service
        self._entry = entry
        self._is_in = is_in
        self._failed = failed
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._begun_s: dict[int, float] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._tasks

    @property
    def are_working(self) -> bool:
        """Is one on its way, for less than ``OWN_WORK_S`` so far?"""
        if not self._begun_s:
            return False
        latest_s = max(self._begun_s.values())
        return asyncio.get_running_loop().time() - latest_s < OWN_WORK_S

    def landing(self, index: int, region: Region) -> PartLanding:
        """Return where a part lands first."""
        pool = self._service.buffer.pool
        return PartLanding(region, self._entry.parts[index].spec, pool)

    def begin(self, index: int, digest: bytes, landing: PartLanding) -> None:
        """Bring a part that has landed to its GPU. Never waits."""
        lifting = self._lift(index, digest, landing)
        self._begun_s[index] = asyncio.get_running_loop().time()
        self._tasks[index] = self._service.run(lifting, "copy to a GPU")
        self._tasks[index].add_done_callback(lambda _: self._begun_s.pop(index))

    def cancel(self) -> list[asyncio.Task[None]]:
        """Bring no more there; return what ends when no GPU writes any more."""
        for task in self._tasks.values():
            task.cancel()
        return [*self._tasks.values()]

    async def _lift(self, index: int, digest: bytes, landing: PartLanding) -> None:
        try:
            if self._entry.parts[index].region is not None:  # else it has left
                await lift_landed([landing], [digest], self._service.buffer.pool)
        except Exception as exc:  # noqa: BLE001 - the writer is told
            self._failed(exc)
        else:
            self._is_in(index, digest)

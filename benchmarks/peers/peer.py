"""The contract of a peer: serve a pool in one process, pull it into another."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, ParamSpec, TypeVar

from benchmarks.peers.work import Pool, Work

__all__ = ("Peer",)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Peer(abc.ABC):
    """One way to move the same bytes. Each end makes its own, with its own pool.

    Whichever way the package offers that is fastest is the one to take. A file
    imports what only its own environment has, so it is imported by name.
    """

    how: ClassVar[str]
    """In one line what of the package does it, and how small blocks travel."""
    packages: ClassVar[Sequence[str]] = ()
    """Distributions whose versions to write down."""
    environ: ClassVar[Mapping[str, str]] = {}
    """Set in both processes before its first call."""
    polls: ClassVar[bool] = False
    """Its source takes CPU while nobody asks: it is stopped between its turns."""
    same_host: ClassVar[bool] = False
    """It does not cross TCP, so neither does asynckv."""
    is_checked: ClassVar[bool] = False
    """It compares checksums of the payload."""

    def __init__(self, pool: Pool, works: Sequence[Work]) -> None:
        self.pool = pool
        self.works = works
        self.pids: tuple[int, ...] = ()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "peer")

    @abc.abstractmethod
    async def serve(self) -> str:
        """Begin to hand out the pool; return the address to connect to."""

    @abc.abstractmethod
    async def connect(self, address: str) -> None:
        """Connect to the address that :meth:`serve` returned there.

        ``pids`` then holds processes that work beside the source's own.
        """

    @abc.abstractmethod
    async def pull(self, work: Work) -> None:
        """Return when the last part is in its place in the pool."""

    async def ping(self, work: Work) -> None:
        """Go there and come back with a few bytes; a pull, if nothing is faster."""
        await self.pull(work)

    async def aclose(self) -> None:
        """Stop serving, or hang up. Who overrides it calls it too."""
        self._thread.shutdown(wait=False)

    async def in_thread(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Call what blocks, as a program on asyncio has to."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, lambda: function(*args, **kwargs)
        )

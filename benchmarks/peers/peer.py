"""The contract of a peer: serve a pool in one process, pull it into another.

Each kind of peer is imported only in its own environment.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, ParamSpec, TypeVar

from benchmarks.peers.work import Pool, Work

__all__ = ("KINDS", "Peer", "peer_class", "peers_of")

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


KINDS: Final = {
    "streams": "streams:Streams",
    "streams-read": "streams:StreamsRead",
    "anyio": "streams:AnyioStreams",
    "zmq": "zmq_pair:ZmqPair",
    "gloo": "gloo:Gloo",
    "grpc": "grpc_aio:GrpcAio",
    "redis": "redis_store:RedisStore",
    "flight": "flight:Flight",
    "nixl": "nixl:Nixl",
    "nixl-tcp": "nixl:NixlTcp",
    "mooncake": "mooncake:Mooncake",
}


def peers_of(environment: str) -> list[str]:
    """Return the peers that are measured in an environment of that name.

    >>> peers_of("nixl"), peers_of("zmq")
    (['nixl', 'nixl-tcp'], ['zmq'])
    """
    return [name for name in KINDS if name.partition("-")[0] == environment]


def peer_class(name: str) -> type[Peer]:
    """Return the class of a peer.

    :raises ImportError: its package is not in this environment
    """
    module, _, attribute = KINDS[name].partition(":")
    found = getattr(importlib.import_module(f"benchmarks.peers.{module}"), attribute)
    if not (isinstance(found, type) and issubclass(found, Peer)):
        raise ImportError(f"{KINDS[name]} is no peer")
    return found

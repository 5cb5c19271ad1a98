"""What every case works with: the peer, the baselines' connections to it, and memory.

Memory that payload comes from and lands in is made once a case and then reused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, ParamSpec, TypeVar

import msgspec
import numpy
import torch

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.cli.bench.baselines import (
    MEETING_KEY,
    Baselines,
    Meeting,
    meeting_from,
    open_baselines,
)
from asynckv.cli.bench.report import Settings
from asynckv.errors import ConfigError
from asynckv.links.address import LOOPBACK, parse_url
from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.tensors.views import bytes_of

__all__ = (
    "LEFT_S",
    "Memory",
    "Rig",
    "WrongBytes",
    "copy_all",
    "make_memory",
    "open_rig",
)


_MARKS = 251
_POISON = 255


class WrongBytes(Exception):
    """What landed is not what was sent."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """``parts`` tensors to send and as many places, in bytes and as tensors.

    ``paged`` is both where they are blocks of a cache: one tensor to asynckv.
    """

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    paged: tuple[KVBlocks, KVBlocks] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that one transfer moves."""
        return sum(source.nbytes for source in self.sources)

    @functools.cached_property
    def layers(self) -> dict[str, KVMemory]:
        """The sources as ``insert`` takes them for its key."""
        if self.paged is not None:
            return {"0": self.paged[0]}
        return {str(index): source for index, source in enumerate(self.sources)}

    @functools.cached_property
    def into(self) -> dict[str, KVMemory]:
        """The targets as ``drop_select`` takes them."""
        if self.paged is not None:
            return {"0.key": self.paged[1]}
        return {f"{index}.key": target for index, target in enumerate(self.targets)}

    @property
    def source_views(self) -> list[memoryview]:
        """The sources, for sockets and copies."""
        return [bytes_of(source) for source in self.sources]

    @property
    def target_views(self) -> list[memoryview]:
        """The targets, for sockets and copies."""
        return [bytes_of(target) for target in self.targets]

    def poison(self) -> None:
        """Fill the targets with what no source holds."""
        for target in self.targets:
            target.fill_(_POISON)

    def check(self) -> None:
        """Compare both ends and the middle of every target with its source.

        :raises WrongBytes: they differ
        """
        for index, target in enumerate(self.targets):
            places = (0, target.numel() // 2, -1)
            if any(int(target[place]) != index % _MARKS for place in places):
                raise WrongBytes(f"wrong bytes in tensor {index}")


def make_memory(parts: int, nbytes: int, *, scattered: bool = False) -> Memory:
    """Return touched memory. Blocks for as long as that takes.

    ``scattered`` ones lie at either end in a pool of twice the size in random
    order, as the blocks of a paged cache do.
    """
    if not scattered:
        sources = [
            torch.full((nbytes,), index % _MARKS, dtype=torch.uint8)
            for index in range(parts)
        ]
        targets = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(parts)]
        return Memory(sources, targets)
    here, there = (_paged(parts, nbytes, seed) for seed in (0, 1))
    for index, place in enumerate(here.block_ids.tolist()):
        here.pool[place] = index % _MARKS
    sources, targets = (
        [blocks.pool[place] for place in blocks.block_ids.tolist()]
        for blocks in (here, there)
    )
    return Memory(sources, targets, (here, there))


def _paged(parts: int, nbytes: int, seed: int) -> KVBlocks:
    pool = torch.zeros((2 * parts, nbytes), dtype=torch.uint8)
    return KVBlocks(pool, random.Random(seed).sample(range(2 * parts), parts))


def copy_all(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> float:
    """Copy part by part in this thread; return the seconds. Releases the GIL."""
    pairs = [
        (numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))
        for target, source in zip(targets, sources, strict=True)
    ]
    began_s = time.perf_counter()
    for target, source in pairs:
        numpy.copyto(target, source)
    return time.perf_counter() - began_s


_P = ParamSpec("_P")
_T = TypeVar("_T")

_MAX_BYTES = "3GiB"

LEFT_S: Final = 60.0
"""How long an entry stays that an interrupted bench has left at a server."""


class Rig:
    """The measuring side, connected. Made by :func:`open_rig`.

    What blocks runs in one thread by :meth:`in_thread`, so that the link stays
    alive beside a baseline that takes its time. Without ``baselines`` the other side
    is a server that is no bench: nothing of it is there but its lookup buffer.
    """

    def __init__(
        self,
        peer: Peer,
        lanes: int,
        baselines: Baselines | None,
        thread: concurrent.futures.Executor,
    ) -> None:
        self.peer = peer
        self.lanes = lanes
        self.is_bench = baselines is not None
        # What an interrupted bench has left at the server is not this one's.
        self.prefix = [secrets.randbits(48)]
        self._baselines = baselines
        self._thread = thread
        self._numbers = itertools.count(1)

    @property
    def baselines(self) -> Baselines:
        """The connections beside the link, with as many raw sockets as it has lanes.

        :raises ConfigError: the other side is no bench
        """
        if self._baselines is None:
            raise ConfigError("the other side is no bench: it has no raw sockets")
        return self._baselines

    @property
    def lookup(self) -> KVLookupBuffer:
        """The buffer of the other process."""
        return self.peer.lookup

    def new_tokens(self) -> list[int]:
        """Return a key that no case of any bench had before."""
        return [*self.prefix, next(self._numbers)]

    async def in_thread(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Call what blocks. A cancelled call goes on; closing the rig ends it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, lambda: function(*args, **kwargs)
        )

    async def cpu_s(self) -> float:
        """Return the CPU seconds of this process and of the peer's; 0 if untold."""
        if not self.is_bench:
            return 0.0
        theirs_s = await self.in_thread(self.baselines.raw.cpu_s)
        return theirs_s + time.process_time()


@contextlib.asynccontextmanager
async def open_rig(url: str, settings: Settings) -> AsyncIterator[Rig]:
    """Connect to the serving side of a bench, or to any server of a lookup buffer.

    :raises ConfigError: what serves there has no lookup buffer
    :raises PeerLost: nothing answers at ``url``
    """
    host = parse_url(url).host or LOOPBACK
    async with contextlib.AsyncExitStack() as stack:
        peer = await stack.enter_async_context(
            connect(
                url,
                max_bytes=_MAX_BYTES,
                digest=settings.digest,
                lanes=settings.lanes,
                secret_file=settings.secret_file,
                tls=settings.tls,
                allow_plaintext=settings.allow_plaintext,
            )
        )
        thread = concurrent.futures.ThreadPoolExecutor(1, "bench")
        stack.callback(thread.shutdown, wait=False)
        lanes, baselines = (await peer.link()).lanes, None
        if (meeting := await _meet(peer)) is not None:
            opening = open_baselines(host, meeting, lanes, thread)
            baselines = await stack.enter_async_context(opening)
        else:
            await peer.lookup.peek([secrets.randbits(48)])  # refused if there is none
        yield Rig(peer, lanes, baselines, thread)


async def _meet(peer: Peer) -> Meeting | None:
    """Return where the baselines are; ``None`` where the server is no bench."""
    try:
        found = await peer.store.get(MEETING_KEY)
        return None if found is None else meeting_from(found)
    except (ConfigError, ValueError, msgspec.MsgspecError):
        return None  # it has no store, or somebody else's

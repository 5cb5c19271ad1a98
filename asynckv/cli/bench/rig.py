"""What every case works with: the peer, and the baselines' connections to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import ParamSpec, TypeVar

import msgspec

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.remote import Peer, connect
from asynckv.cli.bench.meeting import MEETING_KEY, Meeting, meeting_from
from asynckv.cli.bench.raw import RawConnection
from asynckv.cli.bench.raw_streams import RawStreams
from asynckv.cli.bench.settings import Settings
from asynckv.cli.bench.streams import StreamsConnection
from asynckv.errors import ConfigError
from asynckv.links.address import LOOPBACK, parse_url

__all__ = ("Rig", "open_rig")

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MAX_BYTES = "3GiB"


class Rig:
    """The measuring side, connected. Made by :func:`open_rig`.

    What blocks runs in one thread by :meth:`in_thread`, so that the link stays
    alive beside a baseline that takes its time.
    """

    def __init__(
        self,
        peer: Peer,
        raw_streams: RawStreams,
        streams: StreamsConnection,
        thread: concurrent.futures.Executor,
    ) -> None:
        self.peer = peer
        self.raw_streams = raw_streams
        self.streams = streams
        # What an interrupted bench has left at the server is not this one's.
        self.prefix = [secrets.randbits(48)]
        self._thread = thread
        self._numbers = itertools.count(1)

    @property
    def lanes(self) -> int:
        """How many lanes the link has, and so how many raw streams there are."""
        return len(self.raw_streams)

    @property
    def raw(self) -> RawConnection:
        """The one raw socket of what needs but one."""
        return self.raw_streams.first

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
        """Return the CPU seconds of this process and of the peer's."""
        theirs_s = await self.in_thread(self.raw.cpu_s)
        return theirs_s + time.process_time()


@contextlib.asynccontextmanager
async def open_rig(url: str, settings: Settings) -> AsyncIterator[Rig]:
    """Connect to the serving side of a bench.

    :raises ConfigError: what serves there is no bench
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
        meeting = await _meet(peer, url)
        thread = concurrent.futures.ThreadPoolExecutor(1, "bench")
        stack.callback(thread.shutdown, wait=False)
        loop = asyncio.get_running_loop()
        lanes = (await peer.link()).lanes
        raw_streams = await loop.run_in_executor(
            thread, RawStreams, host, meeting.raw_port, meeting.token, lanes
        )
        stack.callback(raw_streams.close)
        streams = await StreamsConnection.open(
            host, meeting.streams_port, meeting.token
        )
        stack.callback(streams.close)
        yield Rig(peer, raw_streams, streams, thread)


async def _meet(peer: Peer, url: str) -> Meeting:
    try:
        found = await peer.store.get(MEETING_KEY)
        if found is not None:
            return meeting_from(found)
    except (ConfigError, ValueError, msgspec.MsgspecError):
        pass  # it has no store, or somebody else's
    raise ConfigError(
        f"what serves at {url} is no bench",
        hint="run `asynckv bench --serve URL` there: the baselines need its sockets",
    )

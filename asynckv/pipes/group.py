"""A group of ranks with a pipe between any two of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, Self

from asynckv.abc.closing import async_with_only
from asynckv.affinity import LoopBound
from asynckv.devices.names import DeviceName, device_named
from asynckv.links.options import make_keyring
from asynckv.pipes.callers import Joining
from asynckv.pipes.pipe import Pipe
from asynckv.security.tls import TLS
from asynckv.types import as_count, as_timeout, parse_bytes

__all__ = ("Group", "join_group")

_MAX_SIZE: Final = 1024


class Group(LoopBound):
    """This rank's pipes, and the barrier that all ranks share.

    Left by ``async with`` after an error, its pipes are aborted.
    """

    def __init__(self, joining: Joining, pipes: Mapping[int, Pipe]) -> None:
        self.rank = joining.rank
        self.size = joining.size
        self._joining = joining
        self._pipes = dict(pipes)

    def __repr__(self) -> str:
        return f"<Group, rank {self.rank} of {self.size}>"

    def pipe_to(self, rank: int) -> Pipe:
        """Return the pipe to ``rank``; it sends there and receives from there.

        :raises ValueError: there is no such rank, or it is this one (in a group
            of one that is a pipe to itself)
        """
        if rank not in self._pipes:
            what = "this very rank" if rank == self.rank else "no rank"
            raise ValueError(f"{rank} is {what} of a group of {self.size}")
        return self._pipes[rank]

    @property
    def next_pipe(self) -> Pipe:
        """The pipe to rank + 1, round the ring: where the original sent."""
        return self._pipes[(self.rank + 1) % self.size]

    @property
    def prev_pipe(self) -> Pipe:
        """The pipe to rank - 1, round the ring: where the original received."""
        return self._pipes[(self.rank - 1) % self.size]

    async def barrier(self) -> None:
        """Wait until every rank has called it as often as this one.

        A cancelled call has come to the barrier all the same: the next call
        waits at the same one.

        :raises PeerLost: a rank is gone, and no barrier is passed any more
        """
        self._check_loop()
        await self._joining.barrier()

    async def aclose(self) -> None:
        """Close all pipes, flushing them, and leave. Does not wait for the others.

        Bounded; a call that is cancelled aborts what is left.

        :raises PipeBroken: something that was sent did not arrive
        """
        self._check_loop()
        closing = [asyncio.ensure_future(p.aclose()) for p in self._pipes.values()]
        try:
            results = await asyncio.gather(*closing, return_exceptions=True)
        except BaseException:
            self.abort()
            raise
        finally:
            await self._joining.aclose()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def abort(self) -> None:
        """Leave now, without a word. Never waits."""
        for pipe in self._pipes.values():
            pipe.abort()
        self._joining.abort()

    async def __aenter__(self) -> Self:
        self._check_loop()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self.abort()
        await self.aclose()


def join_group(
    *,
    rank: int,
    size: int,
    host: str,
    port: int,
    port_offset: int = 0,
    timeout_s: float = 300.0,
    secret_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    allow_plaintext: bool = False,
    max_bytes: int | float | str = "1GB",
    device: DeviceName | None = None,
) -> AbstractAsyncContextManager[Group]:
    """Meet the other ranks at rank 0, which listens at ``host:port + port_offset``.

    Entering waits, at most ``timeout_s``, until every rank has come, opened its
    pipes and reached a first barrier; ranks may start in any order. A cancelled
    entering leaves nothing behind. Ranks dial each other at the IP address that rank 0
    sees each come from: that, or ``tls.server_name``, has to be in each certificate,
    and no NAT may be between them and rank 0.

    :param rank: this process's number, from 0
    :param size: how many ranks there are, 1024 at most
    :param host: where rank 0 listens, and the others find it
    :param port: the port of that address
    :param port_offset: is added to ``port``: one number for each group of a job
    :param timeout_s: for so long entering waits for the last rank
    :param secret_file: a file with the secret that all ranks must share; without it
        ``ASYNCKV_SECRET_FILE`` or ``ASYNCKV_SECRET`` of the environment, if set
    :param tls: this rank's certificate, key and authorities; all ranks need them then
    :param allow_plaintext: go on without TLS, with a secret, between machines
    :param max_bytes: bounds what is in flight in each pipe, and what is received there
        ahead of the application
    :param device: the GPU on which what this rank receives is, as in
        :func:`asynckv.open_pipe`
    :raises PeerLost: a rank did not come in time, and the error says which; or
        it came and was lost again
    :raises ConfigError: the ranks do not agree on the group, rank 0 cannot listen
        there, or an option cannot be honoured
    :raises GPUUnavailable: CuPy, a driver or the GPU is missing
    :raises GPUFailed: the GPU cannot be opened
    :raises ValueError: no such rank, no such port, or no such time
    """
    rank, size = as_count(rank, "rank", least=0), as_count(size, "size")
    if not 1 <= size <= _MAX_SIZE or not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} in a group of {size}")
    port = as_count(port, "port", least=0)
    port_offset = as_count(port_offset, "port_offset", least=0)
    if not isinstance(host, str):
        raise TypeError(f"host is a str, not {host!r:.40}")
    if size > 1 and not 0 < port + port_offset < 2**16:
        raise ValueError(f"{port} + {port_offset} is no port that others could know")
    joining = Joining(
        rank,
        size,
        host=host,
        port=port + port_offset,
        timeout_s=as_timeout(timeout_s, "timeout_s"),
        max_bytes=parse_bytes(max_bytes),
        keyring=make_keyring(secret_file, tls, allow_plaintext),
        device=device_named(device),
    )
    return _joined(joining)


@async_with_only("join_group(...) as group")
async def _joined(joining: Joining) -> AsyncIterator[Group]:
    async with Group(joining, await joining.join()) as group:
        yield group

"""What the checks share: the two sides of a transport, and what they were told.

Whatever a check is about, each part is told of once, on the loop, and not after
its transfer was stopped: that is looked at whenever a pair is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, TypeAlias

import numpy
from numpy.typing import NDArray

from asynckv.abc import PayloadTransport
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect

__all__ = (
    "CHUNK",
    "ENDS_WITHIN_S",
    "LARGE",
    "Bytes",
    "LandedCallback",
    "Landing",
    "LostCallback",
    "MakeTransportPair",
    "Side",
    "TransportCheck",
    "after_turns",
    "all_told",
    "memory",
    "noise",
    "open_sides",
)

Bytes: TypeAlias = NDArray[numpy.uint8]
LostCallback: TypeAlias = Callable[[Exception], None]

LandedCallback: TypeAlias = Callable[[BaseException | None], None]
"""Called with the error, if any, in the moment in which a part is told."""

CHUNK: Final = 4 * 2**20
"""A transport may move as much at a time."""

LARGE: Final = 24 * 2**20
"""More than waits in any socket: what is cut short here is cut in the middle."""

ENDS_WITHIN_S: Final = 1.0

_TIMEOUT_S: Final = 10.0


class MakeTransportPair(Protocol):
    """Opens both ends of a fresh connection, and closes them when it is left.

    Both are open, digests are on or off as said, and each calls its ``lost`` on
    the loop if it ends in any way but by ``aclose`` or ``abort``.
    """

    def __call__(
        self, near_lost: LostCallback, far_lost: LostCallback, *, digest: bool
    ) -> AbstractAsyncContextManager[tuple[PayloadTransport, PayloadTransport]]: ...


TransportCheck: TypeAlias = Callable[[MakeTransportPair], Awaitable[None]]
"""Opens as many pairs as it needs."""


class Landing:
    """What one part was told; await it for the digest, or for the error."""

    def __init__(self, transfer: int, told: LandedCallback | None = None) -> None:
        self.transfer = transfer
        self.is_stopped = False
        self.faults: list[str] = []
        self._told = told
        self._thread = threading.get_ident()
        self._future: asyncio.Future[tuple[bytes, BaseException | None]] = (
            asyncio.get_running_loop().create_future()
        )

    def __call__(self, digest: bytes, error: BaseException | None) -> None:
        if threading.get_ident() != self._thread:
            self.faults.append("told outside the loop")
        elif self.is_stopped:
            self.faults.append("told after the stop")
        elif self._future.done():
            self.faults.append("told twice")
        else:
            if self._told is not None:
                self._told(error)
            self._future.set_result((digest, error))

    def __await__(self) -> Generator[object, None, bytes]:
        return self._outcome().__await__()

    @property
    def is_told(self) -> bool:
        """Somebody has called ``done``."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """What it was told that went wrong, if it was."""
        return self._future.result()[1] if self._future.done() else None

    async def _outcome(self) -> bytes:
        async with asyncio.timeout(_TIMEOUT_S):
            await asyncio.wait({self._future})
        digest, error = self._future.result()
        if error is not None:
            raise error
        return digest


class Side:
    """One end: its transport, why it was lost, and every part it was given."""

    transport: PayloadTransport

    def __init__(self) -> None:
        self.lost: list[Exception] = []
        self.landings: list[Landing] = []

    def send(
        self,
        transfer: int,
        part: int,
        source: Bytes | bytes | bytearray,
        *,
        digest: bytes | None = None,
        told: LandedCallback | None = None,
    ) -> Landing:
        landing = self._new(transfer, told)
        self.transport.send(transfer, part, _view(source), landing, digest=digest)
        return landing

    def receive(
        self,
        transfer: int,
        part: int,
        target: Bytes | bytearray,
        *,
        told: LandedCallback | None = None,
    ) -> Landing:
        landing = self._new(transfer, told)
        self.transport.receive(transfer, part, _view(target), landing)
        return landing

    def stop(self, transfer: int) -> None:
        self.transport.stop(transfer)
        for landing in self.landings:
            if landing.transfer == transfer:
                landing.is_stopped = True

    async def quiesce(self, transfer: int) -> None:
        self.stop(transfer)
        await self.transport.quiesce(transfer)

    def faults(self) -> list[str]:
        """Everything that is wrong with what the parts were told."""
        return [
            f"part of transfer {landing.transfer}: {fault}"
            for landing in self.landings
            for fault in [
                *landing.faults,
                *(["never told"] if _is_forgotten(landing) else []),
            ]
        ]

    def _new(self, transfer: int, told: LandedCallback | None) -> Landing:
        landing = Landing(transfer, told)
        self.landings.append(landing)
        return landing


def _view(buffer: Bytes | bytes | bytearray) -> memoryview:
    return buffer.data if isinstance(buffer, numpy.ndarray) else memoryview(buffer)


def _is_forgotten(landing: Landing) -> bool:
    return not (landing.is_told or landing.is_stopped)


@contextlib.asynccontextmanager
async def open_sides(
    make_pair: MakeTransportPair, *, digest: bool = True
) -> AsyncIterator[tuple[Side, Side]]:
    """Open a pair, and look at what its parts were told when it is left.

    :raises AssertionError: a part was told twice, never, in a thread, or after
        its transfer was stopped
    """
    near, far = Side(), Side()
    pair = make_pair(near.lost.append, far.lost.append, digest=digest)
    async with pair as (near.transport, far.transport):
        yield near, far
    await all_told(near, far)
    for side in (near, far):
        expect(not side.faults(), side.faults())
        expect(len(side.lost) <= 1, f"lost more than once: {side.lost}")


async def all_told(*sides: Side, within_s: float = ENDS_WITHIN_S) -> None:
    """Wait until nobody waits to be told.

    :raises AssertionError: some part is not told of in time
    """
    landings = [landing for side in sides for landing in side.landings]
    try:
        await until(lambda: not any(map(_is_forgotten, landings)), timeout_s=within_s)
    except TimeoutError:
        count = sum(map(_is_forgotten, landings))
        raise AssertionError(
            f"{count} of {len(landings)} parts not told within {within_s:g} s"
        ) from None


async def after_turns(count: int) -> None:
    """Wait for so many turns of the loop: threads get on meanwhile."""
    for _ in range(count):
        await asyncio.sleep(0)


@functools.lru_cache(maxsize=16)
def noise(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes without any pattern, the same each time."""
    return numpy.random.default_rng(seed).bytes(nbytes)


def memory(nbytes: int, value: int = 0) -> Bytes:
    """Return writable memory that holds one value."""
    return numpy.full(nbytes, value, numpy.uint8)

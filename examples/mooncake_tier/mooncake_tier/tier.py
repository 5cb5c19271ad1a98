"""A tier in a Mooncake Store, as an example of how one is written.

What a tier of your own needs is here, too: calls that never raise what their engine
does, a result an item, a header that is shown to the store before its bytes are copied,
and a ``probe`` that heals.

**Memory.** Mooncake's client moves bytes from and to memory of the tier's own, the
*staging*, which it shares with the client's process. It never sees memory of the
store: that is copied here, in a thread, before the client is asked, or after it has
answered. A call that hangs keeps its slot of the staging, and the store keeps charging
what it has lent to it; both have an end when the next probe finds the client stuck,
and kills it.

**Time.** A value's time to live is in its header, which the store looks at.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import numpy

from asynckv.abc import (
    StoreTier,
    TierFacts,
    TierMemory,
    TierResult,
    TierValue,
    WantedValue,
)
from asynckv.errors import ConfigError
from mooncake_tier.client import MISSING, NO_ROOM, REPLACED, Place
from mooncake_tier.process import SLOTS, ClientProcess

__all__ = ("MooncakeTier", "open_tier")

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

_HEADER_NBYTES: Final = 64 * 1024
"""More than any header has."""
_LEAST_NBYTES: Final = SLOTS * 2 * _HEADER_NBYTES
_HINT: Final = (
    "write mooncake://master:50051; options are protocol (tcp or rdma), device, "
    "staging_mib and patience (seconds)"
)


def open_tier(url: str) -> MooncakeTier:
    """Return the tier of ``mooncake://master:50051``: the entry point.

    :raises ConfigError: it is no such URL
    """
    parts = urllib.parse.urlsplit(url)
    options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    try:
        place = Place(
            parts.hostname or "",
            parts.port or 50051,
            protocol=options.pop("protocol", "tcp"),
            device=options.pop("device", ""),
            staging_nbytes=int(options.pop("staging_mib", "128")) * 2**20,
            patience_s=float(options.pop("patience", "1")),
        )
    except ValueError as exc:
        raise ConfigError(f"this is no Mooncake tier: {exc}", hint=_HINT) from None
    is_rest = bool(options or parts.path.strip("/") or parts.username is not None)
    has_room = place.staging_nbytes >= _LEAST_NBYTES
    if not place.host or is_rest or not has_room or not 0 < place.patience_s < 3600:
        raise ConfigError("this URL names no Mooncake tier", hint=_HINT)
    return MooncakeTier(place)


class MooncakeTier(StoreTier):
    """Values in the memory of a Mooncake Store, whose master is at ``place``.

    It brings no memory: that is what ``mooncake_client``, or an engine, gives.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._client: ClientProcess | None = None
        self._is_closed = False
        self._copies = concurrent.futures.ThreadPoolExecutor(1, "mooncake copies")
        self._said: set[str] = set()

    async def probe(self) -> TierFacts:
        if self._is_closed:
            raise OSError("the tier is closed")
        client = self._client
        if client is not None and client.is_full:
            await client.aclose()  # a call hangs, or nobody would probe
        if client is None or client.has_ended:
            client = await ClientProcess.start(self._place)
        try:
            await self._see_to(client)
            async with asyncio.timeout(self._place.patience_s):
                await client.ask("contains", ["asynckv"])
        except BaseException as exc:
            # What hangs hangs there: when that is dead, all that it holds is free.
            client.kill()
            if isinstance(exc, TimeoutError):
                raise OSError("the master does not answer in time") from None
            if isinstance(exc, RuntimeError):
                raise OSError(f"the master cannot be asked: {exc}") from None
            raise
        return TierFacts(
            max_value_nbytes=self._place.staging_nbytes // SLOTS - _HEADER_NBYTES,
            patience_s=self._place.patience_s,
        )

    async def _see_to(self, client: ClientProcess) -> None:
        """Use this one from now on, if it is a new one, once it is connected."""
        if client is not self._client:
            if self._is_closed:
                raise OSError("the tier was closed meanwhile")
            self._client = client
            await client.open()

    async def contains(self, keys: Sequence[str]) -> Sequence[TierResult]:
        codes = await self._ask("contains", keys)
        has = {1: TierResult.DONE, 0: TierResult.MISSING}
        return [has.get(code, TierResult.FAILED) for code in codes]

    async def delete(self, keys: Sequence[str]) -> Sequence[TierResult]:
        codes = await self._ask("remove", keys)
        is_gone = {0: TierResult.DONE, MISSING: TierResult.DONE}
        return [is_gone.get(code, TierResult.FAILED) for code in codes]

    async def fetch(self, wanted: Sequence[WantedValue]) -> Sequence[TierResult]:
        results = [TierResult.FAILED] * len(wanted)
        try:
            await self._fetch(wanted, results)
        except (OSError, RuntimeError) as exc:
            self._failed(exc)
        return results

    async def store(self, values: Sequence[TierValue]) -> Sequence[TierResult]:
        # Of two with one key only the later one would stay.
        last = {value.key: value for value in values}
        results = dict.fromkeys(last, TierResult.FAILED)
        try:
            await self._store(list(last.values()), results)
        except (OSError, RuntimeError) as exc:
            self._failed(exc)
        return [results[value.key] for value in values]

    async def aclose(self) -> None:
        client = self._client
        self.abort()
        if client is not None:
            await client.aclose()

    def abort(self) -> None:
        self._is_closed = True
        client, self._client = self._client, None  # and with it its memory
        if client is not None:
            client.kill()
        self._copies.shutdown(wait=False)

    async def _ask(self, what: str, keys: Sequence[str]) -> Sequence[int]:
        try:
            return await self._running.ask(what, keys) if keys else ()
        except (OSError, RuntimeError) as exc:
            self._failed(exc)
            return [-1] * len(keys)

    async def _fetch(
        self, wanted: Sequence[WantedValue], results: list[TierResult]
    ) -> None:
        client = self._running
        async with client.slot() as (start, staging):
            sizes = await client.ask("sizes", [one.key for one in wanted])
            fitting = []
            for at, size in enumerate(sizes):
                if size < 0:
                    results[at] = _result_of(size)
                elif size > len(staging):
                    results[at] = TierResult.REFUSED
                else:
                    fitting.append((at, size))
                    wanted[at].coming_nbytes = size
            for numbers, places, nbytes in _packed(fitting, len(staging)):
                keys = [wanted[at].key for at in numbers]
                there = [start + place for place in places]
                codes = await client.ask("get", keys, there, nbytes)
                for at, place, code in zip(numbers, places, codes, strict=True):
                    if code < 0:
                        results[at] = _result_of(code)
                        continue
                    wanted[at].moved_nbytes += code
                    data = staging[place : place + code]
                    results[at] = await self._land(wanted[at], data)

    async def _land(self, wanted: WantedValue, data: memoryview) -> TierResult:
        """Copy what has come to where the store wants it."""
        try:
            memory = await wanted.place(data)
        except ValueError:
            return TierResult.MISSING
        if memory is None:
            return TierResult.REFUSED
        value = data[wanted.header_nbytes :]
        if len(value) != memory.nbytes:
            return TierResult.MISSING
        await self._copy(_copy_out, memory, value)
        return TierResult.DONE

    async def _store(
        self, values: Sequence[TierValue], results: dict[str, TierResult]
    ) -> None:
        client = self._running
        async with client.slot() as (start, staging):
            fitting = []
            for at, value in enumerate(values):
                if value.nbytes <= len(staging):
                    fitting.append((at, value.nbytes))
                else:
                    results[value.key] = TierResult.REFUSED
            for numbers, places, nbytes in _packed(fitting, len(staging)):
                for at, place in zip(numbers, places, strict=True):
                    await self._copy(_copy_in, values[at], staging[place:])
                keys = [values[at].key for at in numbers]
                there = [start + place for place in places]
                codes = await client.ask("put", keys, there, nbytes)
                for at, code in zip(numbers, codes, strict=True):
                    results[values[at].key] = _result_of(code)
                    if code >= 0:
                        values[at].moved_nbytes += values[at].nbytes

    async def _copy(
        self, copy: Callable[[_T, memoryview], None], memory: _T, staging: memoryview
    ) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._copies, copy, memory, staging)

    @property
    def _running(self) -> ClientProcess:
        if self._client is None or self._client.has_ended:
            raise ConnectionResetError("Mooncake's client does not run")
        return self._client

    def _failed(self, error: Exception) -> None:
        """Say what has failed: once of each kind."""
        said = f"{type(error).__name__}: {error}"
        if not self._is_closed and said not in self._said:
            self._said.add(said)
            logger.warning("Mooncake at %s: %s", self._place.host, said)


def _result_of(code: int) -> TierResult:
    if code >= 0:
        return TierResult.DONE
    if code in (MISSING, REPLACED):
        return TierResult.MISSING
    return TierResult.REFUSED if code == NO_ROOM else TierResult.FAILED


def _packed(
    sizes: Sequence[tuple[int, int]], room: int
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yield groups that fit: their numbers, where each begins, and its size."""
    numbers: list[int] = []
    places: list[int] = []
    nbytes: list[int] = []
    end = 0
    for number, size in sizes:
        if end + size > room:
            yield numbers, places, nbytes
            numbers, places, nbytes, end = [], [], [], 0
        numbers.append(number)
        places.append(end)
        nbytes.append(size)
        end += size
    if numbers:
        yield numbers, places, nbytes


def _copy_in(value: TierValue, staging: memoryview) -> None:
    end = len(value.header)
    staging[:end] = value.header
    for piece in value.memory.pieces:
        _move(piece, staging[end : end + len(piece)])
        end += len(piece)


def _copy_out(memory: TierMemory, staging: memoryview) -> None:
    end = 0
    for piece in memory.pieces:
        _move(staging[end : end + len(piece)], piece)
        end += len(piece)


def _move(source: memoryview, target: memoryview) -> None:
    # numpy lets the GIL go where a slice assignment keeps it.
    if len(source):
        numpy.copyto(
            numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8)
        )

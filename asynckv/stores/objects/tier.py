"""A tier of a store in an object store, by obstore: each value is one object.

Its name is the key, so who wants it needs one request and no index, wherever it runs.
Values are not packed into larger objects: to find one in a pack, another machine would
have to read an index first, which somebody else changes meanwhile. Requests cost the
same whatever they move, so blocks should be large.

An object begins with when it is void (8 bytes, little endian: a double of seconds since
1970, or infinity); then come the value's header and bytes.

**What is there** is asked by one request a key, for those 8 bytes: but for a listing of
all keys nothing else can tell. It is never asked before a value is fetched, and answers
are remembered, see :class:`~asynckv.stores.known.KnownKeys`. Keys are asked for
in order, 64 at a time, as those of a prefix come: after a round that has found nothing,
or when half of the patience is over, it is unknown (``FAILED``) what the rest is.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import logging
import math
import re
import struct
import time
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Final

import numpy
import obstore
from obstore.exceptions import (
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, ObjectStore, S3Store

from asynckv.abc.tiers import (
    StoreTier,
    TierFacts,
    TierMemory,
    TierPrefix,
    TierResult,
    TierValue,
    WantedValue,
)
from asynckv.affinity import LoopBound
from asynckv.errors import ConfigError
from asynckv.stores.known import KnownKeys
from asynckv.stores.objects.calls import ObstoreCalls, Stopped
from asynckv.stores.objects.url import PATIENCE_S, ObjectPlace, parse_object_url
from asynckv.tensors.copying import HostCopyPool
from asynckv.tensors.jobs import CopyJob
from asynckv.types import as_timeout

if TYPE_CHECKING:
    from obstore import Bytes, GetOptions, GetResult
    from obstore.store import S3Config

__all__ = ("ObjectTier",)

logger = logging.getLogger(__name__)

_READS: Final = 16
_WRITES: Final = 8
_EXPIRY: Final = struct.Struct("<d")
_HEADER_NBYTES: Final = 4096
"""There is room for it beside a value."""
_CHUNK_NBYTES: Final = 4 * 2**20 + _HEADER_NBYTES
_RANGE_NBYTES: Final = 16 * 2**20 + _HEADER_NBYTES
"""By one request of a bucket."""
_NO_KEY: Final = "asynckv"
_KEYS_AT_ONCE: Final = 64
_LISTED_AT_ONCE: Final = 1000
_MAX_VALUE_NBYTES: Final = 5 * 2**30 - 2**20
"""So much takes one request of S3."""
_REQUEST_S: Final = 120
"""Nobody waits so long; but what a frozen server has in hand is kept until then."""
_COPY_NBYTES: Final = 2**20
_ACCESS: Final = (
    "credentials come from the environment, as AWS_ACCESS_KEY_ID; they need "
    "s3:ListBucket, as nobody is told else that an object is missing, s3:GetObject, "
    "s3:PutObject and s3:DeleteObject"
)


class ObjectTier(LoopBound, StoreTier):
    """Values in ``store``, one object each, by names that begin with ``prefix``.

    ``store`` is an ``obstore.store.S3Store`` or ``LocalStore``: with credentials of
    your own, or by :meth:`from_url`. At most 16 requests read at once, each by chunks
    of 4 MiB, which are in memory of obstore's until they are copied; and 8 values are
    written, from where they lie. A value of more than 16 MiB is read by several
    requests for one version of it; if it is replaced meanwhile, it is missing.

    Nothing is ever dropped, for room or as it is void: a bucket has rules for that, by
    age. What is wrong is a failure (``FAILED``), said once of each kind in the log.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str = "",
        *,
        name: str = "an object store",
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.name = name
        self._store: ObjectStore | None = store
        self._prefix = f"{prefix}/" if prefix else ""
        self._patience_s = as_timeout(patience_s, "patience_s")
        # What a LocalStore streams comes by 8 KiB: there, no more than is read whole.
        is_local = isinstance(store, LocalStore)
        self._range_nbytes = _CHUNK_NBYTES if is_local else _RANGE_NBYTES
        self._known = KnownKeys()
        self._calls = ObstoreCalls()
        self._pool = HostCopyPool()
        self._reads = asyncio.Semaphore(_READS)
        self._writes = asyncio.Semaphore(_WRITES)
        self._asks = asyncio.Semaphore(_KEYS_AT_ONCE)
        self._said: set[tuple[str, str]] = set()

    @classmethod
    def from_url(cls, url: str) -> ObjectTier:
        """Make the tier that ``s3://bucket/prefix`` or ``file:///mnt/kv`` names.

        :raises ConfigError: it names none
        """
        place = parse_object_url(url)
        store = _open_s3(place) if place.bucket else LocalStore()
        prefix = "" if place.bucket else place.prefix
        return cls(store, prefix, name=place.name, patience_s=place.patience_s)

    async def probe(self) -> TierFacts:
        self._check_loop()
        store = self._store
        if store is None:
            raise OSError(f"the tier in {self.name} is closed")
        try:
            # One request, of which the first answer is enough: the bucket is there.
            listing = obstore.list(store, self._prefix, chunk_size=1)
            await self._calls.call(listing.__anext__)
        except (StopAsyncIteration, FileNotFoundError):
            pass  # there is nothing yet
        except Exception as exc:  # noqa: BLE001 - whatever it is, it does not work
            await self._check_access()
            raise OSError(f"no answer from {self.name}: {_kind_of(exc)}") from None
        return TierFacts(
            max_value_nbytes=_MAX_VALUE_NBYTES, patience_s=self._patience_s
        )

    async def _check_access(self) -> None:
        """Raise what is to be said if access is denied: a listing does not tell."""
        try:
            await self._ask(_NO_KEY)
        except (PermissionDeniedError, UnauthenticatedError) as exc:
            raise ConfigError(
                f"access to {self.name} is denied: {_kind_of(exc)}", hint=_ACCESS
            ) from None
        except Exception:  # noqa: BLE001 - the listing has failed of that, too
            return

    async def contains(self, keys: Sequence[str]) -> Sequence[TierResult]:
        loop = self._check_loop()
        until_s = loop.time() + self._patience_s / 2
        found: dict[str, TierResult] = {}
        distinct = list(dict.fromkeys(keys))
        for start in range(0, len(distinct), _KEYS_AT_ONCE):
            some = distinct[start : start + _KEYS_AT_ONCE]
            results = await asyncio.gather(*map(self._look_for, some))
            found.update(zip(some, results, strict=True))
            if TierResult.DONE not in results or loop.time() > until_s:
                break
        return [found.get(key, TierResult.FAILED) for key in keys]

    async def fetch(self, wanted: Sequence[WantedValue]) -> Sequence[TierResult]:
        self._check_loop()
        return await asyncio.gather(*map(self._fetch, wanted))

    async def store(self, values: Sequence[TierValue]) -> Sequence[TierResult]:
        self._check_loop()
        # Of two with one key only the later one would stay.
        last = {value.key: value for value in values}
        results = await asyncio.gather(*map(self._write, last.values()))
        written = dict(zip(last, results, strict=True))
        return [written[value.key] for value in values]

    async def delete(self, keys: Sequence[str]) -> Sequence[TierResult]:
        self._check_loop()
        return await asyncio.gather(*map(self._delete, keys))

    async def clear(self, prefix: TierPrefix) -> TierResult:
        """As of every tier. Names are listed, and each object is deleted by a request,
        as many at once as are written: of a million objects that takes hours.
        """
        self._check_loop()
        result = TierResult.DONE
        try:
            begin = self._path_of(prefix.prefix)
            listing = obstore.list(self._open_store, begin, chunk_size=_LISTED_AT_ONCE)
            while True:
                some = await self._calls.call(listing.__anext__)
                prefix.moved_nbytes += 1
                keys = [one["path"].removeprefix(self._prefix) for one in some]
                for start in range(0, len(keys), _WRITES):  # others write, too
                    deleted = await self.delete(keys[start : start + _WRITES])
                    prefix.moved_nbytes += 1
                    if TierResult.FAILED in deleted:
                        result = TierResult.FAILED
        except StopAsyncIteration:
            return result
        except FileNotFoundError:  # there is no such folder, or there was one
            return TierResult.FAILED if prefix.moved_nbytes else result
        except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
            return self._failed("listed", exc)

    async def aclose(self) -> None:
        self.abort()
        await self._calls.aclose()

    def abort(self) -> None:
        self._calls.abort()
        self._pool.close()
        self._store = None  # its connections are closed when calls have let go of it

    async def _look_for(self, key: str) -> TierResult:
        loop = asyncio.get_running_loop()
        is_there = self._known.is_there(key, loop.time())
        if is_there is None:
            question, left_s = self._known.ask(key), None
            try:
                left_s = await self._ask(key)
            except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
                self._failed("looked for", exc)
            self._known.answer(key, question, left_s, loop.time())
            if left_s is None:
                return TierResult.FAILED
            is_there = left_s > 0
        return TierResult.DONE if is_there else TierResult.MISSING

    async def _ask(self, key: str) -> float:
        """Return for how long a key is there; 0: it is missing."""
        async with self._asks:
            try:
                found = await self._get(
                    self._path_of(key), {"range": (0, _EXPIRY.size)}
                )
                return _left_s(await self._calls.call(found.bytes_async))
            except FileNotFoundError:
                return 0.0

    async def _fetch(self, wanted: WantedValue) -> TierResult:
        question, left_s = self._known.ask(wanted.key), None
        try:
            result = await self._read(wanted)
            left_s = 0.0 if result is TierResult.MISSING else None
        except FileNotFoundError:
            result, left_s = TierResult.MISSING, 0.0
        except PreconditionError:  # between two pieces it was replaced
            result = TierResult.MISSING
        except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
            result = self._failed("read", exc)
        now_s = asyncio.get_running_loop().time()
        self._known.answer(wanted.key, question, left_s, now_s)
        return result

    async def _read(self, wanted: WantedValue) -> TierResult:
        path = self._path_of(wanted.key)
        async with self._reads:
            found = await self._get(path, {"range": (0, self._range_nbytes)})
            nbytes = wanted.coming_nbytes = found.meta["size"]
            version = found.meta["e_tag"]
            chunks = _Chunks(self._calls, found, wanted)
            data = await chunks.next()
            memory = await _place(wanted, data, nbytes)
            if isinstance(memory, TierResult):
                wanted.coming_nbytes = 0
                return memory
            begins = _EXPIRY.size + wanted.header_nbytes
            await self._land(data[begins:], memory, 0)
            first_range = range(len(data), min(nbytes, self._range_nbytes))
            await self._land_all(chunks, first_range, wanted, memory)

        async def read_range(one: range) -> None:
            async with self._reads:
                options: GetOptions = {"range": (one.start, one.stop)}
                if version is not None:  # else the digest tells two versions apart
                    options["if_match"] = version
                chunks = _Chunks(self._calls, await self._get(path, options), wanted)
                await self._land_all(chunks, one, wanted, memory)

        others = _cut(range(self._range_nbytes, nbytes), self._range_nbytes)
        await _all_of([read_range(one) for one in others])
        return TierResult.DONE

    async def _land_all(
        self, chunks: _Chunks, of: range, wanted: WantedValue, memory: TierMemory
    ) -> None:
        """Bring these bytes of an object, as they come, to where they go."""
        at, begins = of.start, _EXPIRY.size + wanted.header_nbytes
        while at <= of.stop and (data := await chunks.next()):
            await self._land(data, memory, at - begins)
            at += len(data)
        if at != of.stop:
            raise EOFError(f"{at - of.start} bytes of {len(of)}")

    async def _get(self, path: str, options: GetOptions) -> GetResult:
        store = self._open_store
        return await self._calls.call(
            lambda: obstore.get_async(store, path, options=options)
        )

    async def _land(self, data: memoryview, memory: TierMemory, start: int) -> None:
        await self._pool.run([_Landing(data, memory, start)])

    async def _write(self, value: TierValue) -> TierResult:
        self._known.begin_change(value.key)
        expires_at_s = math.inf if value.expires_at_s is None else value.expires_at_s
        begin = _EXPIRY.pack(expires_at_s) + value.header
        pieces = [memoryview(begin), *value.memory.pieces]
        try:
            async with self._writes:
                store, path = self._open_store, self._path_of(value.key)
                await self._calls.put(store, path, pieces)
        except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
            return self._failed("written", exc)
        value.moved_nbytes += value.nbytes
        now_s = asyncio.get_running_loop().time()
        self._known.changed(value.key, _left_s(begin), now_s)
        return TierResult.DONE

    async def _delete(self, key: str) -> TierResult:
        self._known.begin_change(key)
        try:
            async with self._writes:
                store, path = self._open_store, self._path_of(key)
                await self._calls.call(lambda: obstore.delete_async(store, path))
        except FileNotFoundError:
            pass
        except Exception as exc:  # noqa: BLE001 - also what only a bug would raise
            return self._failed("deleted", exc)
        self._known.changed(key, 0.0, asyncio.get_running_loop().time())
        return TierResult.DONE

    @property
    def _open_store(self) -> ObjectStore:
        if self._store is None:
            raise Stopped
        return self._store

    def _path_of(self, key: str) -> str:
        if not key:
            raise ValueError("no object has an empty name")
        return self._prefix + key

    def _failed(self, what: str, error: Exception) -> TierResult:
        """Say what has failed: once for each kind."""
        kind = what, _kind_of(error)
        if self._store is not None and kind not in self._said:
            self._said.add(kind)
            logger.warning("values in %s could not be %s: %s", self.name, *kind)
        return TierResult.FAILED


class _Chunks:
    """What a request brings: all of it if that is little, else as it comes."""

    def __init__(
        self, calls: ObstoreCalls, found: GetResult, wanted: WantedValue
    ) -> None:
        self._calls, self._wanted = calls, wanted
        start, stop = found.range
        self._is_whole = stop - start <= _CHUNK_NBYTES
        if self._is_whole:
            self._begin_next: Callable[[], Awaitable[bytes | Bytes]] = found.bytes_async
        else:
            self._begin_next = found.stream(min_chunk_size=_CHUNK_NBYTES).__anext__
        self._is_over = False

    async def next(self) -> memoryview:
        """Return what comes next; nothing behind the end."""
        if self._is_over:
            return memoryview(b"")
        try:
            data = memoryview(await self._calls.call(self._begin_next))
        except StopAsyncIteration:
            data = memoryview(b"")
        self._wanted.moved_nbytes += len(data)
        self._is_over = self._is_whole or len(data) < _CHUNK_NBYTES
        return data


class _Landing(CopyJob):
    """What was read is copied to where it goes, from ``start`` of that on."""

    def __init__(self, data: memoryview, memory: TierMemory, start: int) -> None:
        self._data, self._memory, self._start = data, memory, start

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def steps(self) -> Generator[None, None, None]:
        begin, done = 0, 0
        for piece in self._memory.pieces:
            stop = begin + len(piece)
            while done < len(self._data) and self._start + done < stop:
                at = self._start + done - begin
                target = piece[at : at + _COPY_NBYTES]
                source = self._data[done : done + len(target)]
                # numpy lets the GIL go where a slice assignment keeps it.
                numpy.copyto(
                    numpy.frombuffer(target[: len(source)], numpy.uint8),
                    numpy.frombuffer(source, numpy.uint8),
                )
                done += len(source)
                yield
            begin = stop


def _open_s3(place: ObjectPlace) -> ObjectStore:
    options: S3Config = {"disable_bulk_delete": True}
    if place.region is not None:
        options["region"] = place.region
    if place.endpoint is not None:
        options["endpoint"] = place.endpoint
    if place.skip_signature:
        options["skip_signature"] = True
    try:
        return S3Store(
            place.bucket,
            prefix=place.prefix or None,
            config=options,
            client_options={
                "allow_http": place.allow_http,
                "connect_timeout": datetime.timedelta(seconds=place.patience_s),
                "timeout": datetime.timedelta(seconds=_REQUEST_S),
            },
            retry_config={"max_retries": place.retries},
        )
    except Exception as exc:
        raise ConfigError(
            f"{place.name} cannot be used: {_kind_of(exc)}", hint=_ACCESS
        ) from exc


async def _place(
    wanted: WantedValue, data: memoryview, nbytes: int
) -> TierMemory | TierResult:
    """Ask where a value goes; ``data`` is what its object begins with."""
    if _left_s(data) <= 0:
        return TierResult.MISSING
    try:
        memory = await wanted.place(data[_EXPIRY.size :])
    except ValueError:  # it was all that there is of the header
        return TierResult.MISSING
    if memory is None:
        return TierResult.REFUSED
    is_whole = _EXPIRY.size + wanted.header_nbytes + memory.nbytes == nbytes
    return memory if is_whole else TierResult.MISSING


def _left_s(data: bytes | memoryview | Bytes) -> float:
    """Say for how long an object is valid that begins so; 0: it is not."""
    if len(data) < _EXPIRY.size:
        return 0.0
    expires_at_s: float
    (expires_at_s,) = _EXPIRY.unpack_from(data)
    return max(expires_at_s - time.time(), 0.0)


def _cut(rest: range, most: int) -> list[range]:
    """Return parts of what is left of an object, alike, and no longer than ``most``."""
    count = -(-len(rest) // most)
    places = [rest.start + len(rest) * one // max(count, 1) for one in range(count + 1)]
    return [range(*pair) for pair in itertools.pairwise(places)]


async def _all_of(reads: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait until all have ended, and raise what the first of them raised."""
    results = await asyncio.gather(*reads, return_exceptions=True)
    for error in results:
        if error is not None:
            raise error


def _kind_of(error: Exception) -> str:
    """Say what went wrong, without anything that a server or an URL has said.

    Those tell more than a log should have: URLs of a login have its token in them.
    """
    details = re.findall(r"status code: \d+|os error \d+", str(error))
    return " ".join([type(error).__name__, *details[:1]])

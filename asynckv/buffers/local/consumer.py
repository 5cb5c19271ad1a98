"""Taking entries from a buffer of this process.

One ``drop_select`` has two faces: a coroutine, and a context manager.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, TypeAlias

from asynckv.abc import DropSelect, KVEntry, SelectStream
from asynckv.buffers.entries.entries import Lease
from asynckv.buffers.entries.leases import Leases
from asynckv.buffers.local.select import LocalSelect, hand_over, lend
from asynckv.buffers.local.writer import LocalStream
from asynckv.devices.copying import CopyPool
from asynckv.errors import BufferClosed
from asynckv.tensors.blocks import KVMemory
from asynckv.transfers.tokens import Query
from asynckv.types import KVFingerprint

__all__ = (
    "LocalConsumer",
    "PendingSelect",
)


_Targets: TypeAlias = Mapping[str, KVMemory]
_Copy: TypeAlias = Callable[[Lease, CopyPool, _Targets], Awaitable[KVEntry]]


class LocalConsumer:
    """The ways to take an entry, with a copy or with the memory itself.

    ``check`` is called first by each, and refuses what must not go on.
    """

    def __init__(
        self,
        leases: Leases,
        pool: CopyPool,
        fingerprint: KVFingerprint | None,
        check: Callable[[], object],
    ) -> None:
        self._leases = leases
        self._pool = pool
        self._fingerprint = fingerprint
        self._check = check

    async def take(self, query: Query, targets: _Targets) -> KVEntry:
        """Do what awaiting a ``drop_select`` does."""
        with self._select(query) as select:
            lease, entry = await self._entry(select, hand_over, targets)
            self._leases.acknowledge(lease)
        return entry

    @asynccontextmanager
    async def borrow(self, query: Query, targets: _Targets) -> AsyncIterator[KVEntry]:
        """Do what entering a ``drop_select`` does."""
        with self._select(query) as select:
            lease, entry = await self._entry(select, lend, targets)
            self._leases.reach(lease)
            yield entry
        self._leases.acknowledge(lease)

    @asynccontextmanager
    async def stream(
        self, query: Query, targets: _Targets, kind: type[LocalStream] = LocalStream
    ) -> AsyncIterator[SelectStream]:
        """Do what entering an ``open_drop_select`` does, with a stream of that kind."""
        with self._select(query, streams=True) as select:
            lease = await select.lease()
            stream = kind(select, lease, self._pool, targets)
            self._leases.reach(lease)
            try:
                yield stream
            finally:
                stream.close()
        self._leases.acknowledge(lease)

    def _select(self, query: Query, *, streams: bool = False) -> LocalSelect:
        self._check()
        if self._leases.is_closed:
            raise BufferClosed("the buffer is closed")
        return LocalSelect(self._leases, query, self._fingerprint, streams=streams)

    async def _entry(
        self, select: LocalSelect, copy: _Copy, targets: _Targets
    ) -> tuple[Lease, KVEntry]:
        while True:
            lease = await select.lease()
            entry = await copy(lease, self._pool, targets)
            if lease.is_valid:
                return lease, entry
            del entry  # its views: the next may be long in coming


_Borrowed = AbstractAsyncContextManager[KVEntry, bool | None]


class PendingSelect(DropSelect):
    """Takes an entry when awaited, borrows one when entered.

    ``take`` and ``borrow`` are called at the first use, and only one of them,
    with ``query`` and ``targets``.
    """

    _coroutine: Coroutine[Any, Any, KVEntry] | None = None
    _context: _Borrowed | None = None
    _used = False

    def __init__(
        self,
        take: Callable[[Query, _Targets], Coroutine[Any, Any, KVEntry]],
        borrow: Callable[[Query, _Targets], _Borrowed],
        query: Query,
        targets: _Targets,
    ) -> None:
        self._take = take
        self._borrow = borrow
        self._query = query
        self._targets = targets

    def __repr__(self) -> str:
        return f"<drop_select, {'used' if self._used else 'not used yet'}>"

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            warnings.warn(
                "drop_select(...) was never awaited, nor entered by 'async with'",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __await__(self) -> Generator[Any, Any, KVEntry]:
        self._use()
        return self._take(self._query, self._targets).__await__()

    def send(self, value: Any, /) -> Any:
        return self._running().send(value)

    def throw(self, *error: Any) -> Any:
        return self._running().throw(*error)

    def close(self) -> None:
        self._used = True
        if self._coroutine is not None:
            self._coroutine.close()

    def __aenter__(self) -> Coroutine[Any, Any, KVEntry]:
        self._use()
        self._context = self._borrow(self._query, self._targets)
        return self._context.__aenter__()

    def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> Coroutine[Any, Any, bool | None]:
        if self._context is None:
            raise RuntimeError("this drop_select was never entered")
        return self._context.__aexit__(exc_type, exc, traceback)

    def _running(self) -> Coroutine[Any, Any, KVEntry]:
        if self._coroutine is None:
            self._use()
            self._coroutine = self._take(self._query, self._targets)
        return self._coroutine

    def _use(self) -> None:
        if self._used:
            raise RuntimeError(
                "this drop_select was used before; call drop_select again"
            )
        self._used = True

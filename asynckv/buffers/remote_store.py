"""A store buffer at the other end of a link, with the same face as a local one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.asking import ask
from asynckv.buffers.manifest import INLINE_NBYTES, Manifest, unpack, verify_inline
from asynckv.buffers.pushing import dense
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.buffers.store import check_key
from asynckv.errors import (
    AsyncKVError,
    PeerLost,
    PeerRestarted,
    RemoteProtocolError,
)
from asynckv.links.link import Link
from asynckv.links.receiving import Reception
from asynckv.observability.waits import LoggedWait
from asynckv.protocol.digests import digest_of
from asynckv.protocol.failures import from_failure
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Contains,
    Delete,
    Done,
    Failure,
    Frame,
    Get,
    Grant,
    Offer,
    Put,
    Result,
)
from asynckv.tensors.views import bytes_of, check_into, empty_tensor, spec_of

if TYPE_CHECKING:
    from asynckv.buffers.remote import Peer

__all__ = ("RemoteStoreBuffer", "RemoteStoreStatistics")

_BATCH_KEYS: Final = 4096
_BATCH_NBYTES: Final = 32 * 1024


@dataclasses.dataclass(frozen=True)
class RemoteStoreStatistics:
    """This side of a remote store."""

    getting: int
    putting: int
    is_connected: bool


class RemoteStoreBuffer(KVStoreBuffer):
    """The store buffer that a peer serves. It is closed with its peer."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._getting = 0
        self._putting = 0

    async def put(self, key: str, value: torch.Tensor | None) -> None:
        self._peer.check()
        check_key(key)
        if value is None:
            await self.delete(key)
            return
        tensor = await dense(value, self._peer.pool)
        self._putting += 1
        try:
            await self._put(key, tensor)
        finally:
            self._putting -= 1

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        self._peer.check()
        check_key(key)
        if into is not None:
            bytes_of(into)  # refuses what nothing can land in, also on a miss
        self._getting += 1
        try:
            return await self._get(key, into)
        finally:
            self._getting -= 1

    async def delete(self, key: str) -> bool:
        self._peer.check()
        check_key(key)
        return bool((await ask(self._peer, Delete(key))).value)

    async def contains(self, keys: Sequence[str]) -> tuple[bool, ...]:
        self._peer.check()
        if isinstance(keys, str):
            raise TypeError("contains takes a sequence of keys, not one key")
        for key in keys:
            check_key(key)
        flags: list[bool] = []
        for some in _batches(keys):
            flags.extend((await ask(self._peer, Contains(some))).flags)
        return tuple(flags)

    def statistics(self) -> RemoteStoreStatistics:
        return RemoteStoreStatistics(
            self._getting, self._putting, self._peer.is_connected
        )

    async def aclose(self) -> None:
        """Close the peer, which is this buffer's only way."""
        await self._peer.aclose()

    def abort(self) -> None:
        """Abort the peer."""
        self._peer.abort()

    async def _put(self, key: str, tensor: torch.Tensor) -> None:
        """A put that was cut off is made again: the last one counts."""
        while True:
            link = await self._peer.link()
            putting = _Putting(link, key, tensor)
            try:
                who = f"put of {key!r} ({tensor.nbytes} bytes)"
                room = f"room in the store at {self._peer.url}"
                with LoggedWait(who, room, "the end of a get or put there"):
                    await putting.answer
                return
            except PeerLost:
                if link.is_open:
                    raise  # the peer says so, of something else
                await putting.quiesce()
                incarnation = (await self._peer.link()).peer.incarnation
                if incarnation != link.peer.incarnation:
                    raise PeerRestarted(
                        f"{self._peer.url} came back without its memory"
                    ) from None
            except BaseException:
                putting.cancel()
                await putting.quiesce()
                raise

    async def _get(self, key: str, into: torch.Tensor | None) -> torch.Tensor | None:
        while True:
            link = await self._peer.link()
            getting = _Getting(link, key, into, self._peer.budget)
            try:
                return await getting.value()
            except PeerLost:
                await getting.quiesce()
                if link.is_open:
                    raise  # the peer says so, of something else
            except BaseException:
                getting.cancel()
                await getting.quiesce()
                raise
            finally:
                getting.release()


class _Putting:
    """One put on one link: lanes read the caller's memory."""

    def __init__(self, link: Link, key: str, tensor: torch.Tensor) -> None:
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = link
        self._view = bytes_of(tensor)
        self._is_cancelled = False
        self._transfer = link.new_transfer()
        inline = len(self._view) <= INLINE_NBYTES
        digest = digest_of(self._view) if inline and link.digest != "off" else b""
        frame = Put(
            key=key,
            transfer=self._transfer,
            inline=inline,
            spec=spec_of(tensor),
            digest=digest,
        )
        self._stream = link.open_stream(self, frame, self._view if inline else b"")

    def cancel(self) -> None:
        """Withdraw it, if it is not in yet. Never waits."""
        self._is_cancelled = True
        self._stream.send(Cancel())
        self._link.payload.stop(self._transfer)

    async def quiesce(self) -> None:
        """Wait until no thread reads the tensor (at most 1 s; shielded)."""
        await self._link.payload.quiesce(self._transfer)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Grant(transfer=self._transfer):
                if not self._is_cancelled:
                    self._link.payload.send(self._transfer, 0, self._view, self._sent)
            case Accepted():
                self._end(None)
            case Cancelled():
                self._end(AsyncKVError("the peer gave the put up"))
            case Failure():
                self._end(from_failure(frame))
            case _:
                error = RemoteProtocolError(f"no {type(frame).__name__} belongs here")
                self._end(error)  # of a last frame's stream nobody else is told
                raise error

    def on_lost(self, error: PeerLost) -> None:
        self._end(error)

    def _sent(self, digest: bytes, error: BaseException | None) -> None:
        if error is None and not self.answer.done():
            self._stream.send(Done(self._transfer, 0, digest))

    def _end(self, error: Exception | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(None)
        else:
            self.answer.set_exception(error)
            self.answer.exception()  # who puts may have been cancelled meanwhile


class _Getting:
    """One get on one link."""

    def __init__(
        self, link: Link, key: str, into: torch.Tensor | None, budget: ReceiveBudget
    ) -> None:
        loop = asyncio.get_running_loop()
        self._key = key
        self._link = link
        self._into = into
        self._budget = budget
        self._charged_bytes = 0
        self._reception: Reception | None = None
        self._offer: asyncio.Future[tuple[Offer, Manifest] | None] = (
            loop.create_future()
        )
        self._landed: asyncio.Future[None] = loop.create_future()
        self._stream = link.open_stream(self, Get(key))

    async def value(self) -> torch.Tensor | None:
        """Return the tensor, verified, or ``None``."""
        found = await self._offer
        if found is None:
            return None
        offer, manifest = found
        (record,) = manifest.records
        if self._into is not None:
            check_into(self._into, record.spec, self._key)
        if offer.inline:
            verify_inline(manifest)
            target = empty_tensor(record.spec) if self._into is None else self._into
            bytes_of(target)[:] = manifest.inline[0]  # at most 64 KiB
            return target
        if self._into is None:
            await self._budget.reserve(record.spec.nbytes)
            self._charged_bytes = record.spec.nbytes
        target = empty_tensor(record.spec) if self._into is None else self._into
        self._reception = Reception(
            self._link, offer.transfer, [bytes_of(target)], self
        )
        self._reception.begin()
        self._stream.send(Grant(offer.transfer))
        await self._landed
        return target

    def release(self) -> None:
        """The tensor is the application's now, or nobody's. Never waits."""
        self._budget.release(self._charged_bytes)
        self._charged_bytes = 0

    def cancel(self) -> None:
        """The value is not wanted any more. Never waits."""
        self._stream.send(Cancel())
        if self._reception is not None:
            self._reception.stop()

    async def quiesce(self) -> None:
        """Wait until nothing touches memory that the caller lent (at most 1 s)."""
        if self._reception is not None and self._into is not None:
            await self._reception.quiesce()

    def part_verified(self, index: int, digest: bytes) -> None:
        if not self._landed.done():
            self._landed.set_result(None)

    def reception_failed(self, error: Exception) -> None:
        self._fail(error)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Offer():
                manifest = unpack(body, inline=frame.inline)
                self._link.payload.announce(frame.transfer)
                if len(manifest.records) != 1:
                    raise RemoteProtocolError("a value is one tensor")
                if not self._offer.done():
                    self._offer.set_result((frame, manifest))
            case Done():
                if self._reception is not None:
                    self._reception.on_done(frame)
            case Result():
                if not self._offer.done():
                    self._offer.set_result(None)
            case Failure():
                self._fail(from_failure(frame))
            case Cancelled():
                pass
            case _:
                error = RemoteProtocolError(f"no {type(frame).__name__} belongs here")
                self._fail(error)  # of a last frame's stream nobody else is told
                raise error

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        for future in (self._offer, self._landed):
            if not future.done():
                future.set_exception(error)
                future.exception()  # one of them is awaited, or none


def _batches(keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield ``keys`` in as many at a time as fit in one frame."""
    some: list[str] = []
    nbytes = 0
    for key in keys:
        size = len(key.encode()) + 5
        if nbytes + size > _BATCH_NBYTES or len(some) == _BATCH_KEYS:
            yield tuple(some)
            some, nbytes = [], 0
        some.append(key)
        nbytes += size
    if some:
        yield tuple(some)

"""Taking entries from a peer, on one link after the other while links are cut."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from asynckv.abc import KVEntry, SelectStream
from asynckv.buffers.asking import ask
from asynckv.buffers.delivery import Delivery
from asynckv.buffers.lifting import lift_all, lift_some
from asynckv.buffers.queries import TOKEN_NBYTES, Query
from asynckv.buffers.remote_stream import RemoteStream
from asynckv.buffers.selecting import Selecting
from asynckv.errors import EntryAborted, LeaseLost, PeerLost, PeerRestarted
from asynckv.links.gpu_link import GpuPathLost
from asynckv.links.link import Link
from asynckv.observability.waits import LoggedWaits
from asynckv.protocol.frames import Settle
from asynckv.tensors.blocks import KVMemory

if TYPE_CHECKING:
    from asynckv.buffers.remote import Peer

__all__ = ("RemoteConsumer",)


class RemoteConsumer:
    """The three ways to take an entry from the lookup buffer of ``peer``."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._waits = LoggedWaits(_who_waits, "a match", f"an insert at {peer.url}")

    @property
    def waiting(self) -> int:
        """How many calls wait for an entry, or for its bytes."""
        return len(self._waits)

    async def take(self, query: Query, targets: Mapping[str, KVMemory]) -> KVEntry:
        """Do what awaiting a ``drop_select`` does."""
        while True:
            selecting, delivery = await self._select(query, targets)
            if delivery.is_small:
                selecting.settle_at_once(delivery)
                return delivery.entry()
            if await self._settle(selecting, delivery):
                return delivery.entry()

    @asynccontextmanager
    async def borrow(
        self, query: Query, targets: Mapping[str, KVMemory]
    ) -> AsyncIterator[KVEntry]:
        """Do what entering a ``drop_select`` does."""
        selecting, delivery = await self._select(query, targets, views=True)
        lent = [delivery.entry()]
        delivery.forget()
        selecting.release()
        try:
            selecting.reach(delivery)
            yield lent.pop()  # kept by nobody here: its memory may be another's
        except BaseException as exc:
            await _give_back(selecting, delivery, exc)
            raise
        await self._acknowledge(selecting, delivery)

    @asynccontextmanager
    async def stream(
        self, query: Query, targets: Mapping[str, KVMemory]
    ) -> AsyncIterator[SelectStream]:
        """Do what entering an ``open_drop_select`` does."""
        selecting, delivery = await self._select(query, targets, streams=True)
        stream = RemoteStream(selecting, delivery, targets, self._peer.pool)
        try:
            selecting.reach(delivery)
            yield stream
            stream.close()
        except BaseException as exc:
            await _give_back(selecting, delivery, exc)
            raise
        await self._acknowledge(selecting, delivery)

    async def _select(
        self,
        query: Query,
        targets: Mapping[str, KVMemory],
        *,
        streams: bool = False,
        views: bool = False,
    ) -> tuple[Selecting, Delivery]:
        while True:
            # Each of thousands that wait has this frame: it is kept small.
            selecting = self._ask(
                *(self._peer.link_nowait() or await self._peer.link(), query, targets),
                streams=streams,
                views=views,
            )
            try:
                has_gpu = self._peer.on_gpu is not None or bool(targets)
                lifts = has_gpu and not streams
                lift = partial(self._lift, targets) if lifts else None
                delivery = await selecting.delivered(lift)
                if lifts:
                    await lift_all(delivery, targets, self._peer.pool)
                return selecting, delivery
            except BaseException as exc:
                if not await _may_ask_again(selecting, exc):
                    raise
            finally:
                self._waits.end(selecting)

    def _ask(
        self,
        link: Link,
        query: Query,
        targets: Mapping[str, KVMemory],
        *,
        streams: bool,
        views: bool,
    ) -> Selecting:
        peer = self._peer
        selecting = Selecting(
            *(link, query, targets, peer.budget),
            streams=streams,
            reader=peer.ways.reader(link, views=views),
            ways=None if peer.on_gpu is None else peer.ways,
        )
        self._waits.begin(selecting)
        return selecting

    async def _lift(
        self,
        targets: Mapping[str, KVMemory],
        delivery: Delivery,
        names: Sequence[str],
    ) -> None:
        """One tensor is copied to the GPU while others are on the wire."""
        await lift_some(delivery, names, targets, self._peer.pool)

    async def _settle(self, selecting: Selecting, delivery: Delivery) -> bool:
        """Acknowledge receipt of what is not small; ``False`` if it did not count."""
        try:
            await selecting.settle(delivery)
        except PeerLost:
            selecting.close()
            await selecting.quiesce()
            return await self._counted(selecting, delivery)
        except LeaseLost:
            selecting.cancel()
            return False
        except BaseException:
            selecting.cancel()
            raise
        selecting.release()
        return True

    async def _counted(self, selecting: Selecting, delivery: Delivery) -> bool:
        """The link was cut around the acknowledgement: ask on the next one."""
        question = Settle(delivery.offer.entry_id, delivery.offer.token)
        asked = selecting.link.peer.incarnation  # it changes when memory was lost
        answer = await ask(self._peer, question, incarnation=asked)
        return bool(answer.value)

    async def _has_counted(self, selecting: Selecting, delivery: Delivery) -> bool:
        """As :meth:`_counted`; ``False`` if there is nobody left to ask."""
        try:
            return selecting.may_have_counted and await self._counted(
                selecting, delivery
            )
        except (PeerLost, PeerRestarted):
            return False

    async def _acknowledge(self, selecting: Selecting, delivery: Delivery) -> None:
        try:
            await selecting.acknowledge(delivery)
        except PeerLost as exc:
            if not await self._has_counted(selecting, delivery):
                raise LeaseLost(
                    f"the link was lost before entry {delivery.offer.entry_id!r} was "
                    "acknowledged; it was given back",
                ) from exc
        except EntryAborted as exc:
            raise LeaseLost(
                f"entry {delivery.offer.entry_id!r} left before it was acknowledged"
            ) from exc
        finally:
            selecting.close()
            await selecting.quiesce()


async def _may_ask_again(selecting: Selecting, error: BaseException) -> bool:
    """End what has failed before anything of it was handed out; whether to go on."""
    if isinstance(error, PeerLost | EntryAborted):
        selecting.close()
    else:
        selecting.cancel()
    await selecting.quiesce()
    if isinstance(error, PeerLost):
        return not selecting.link.is_open  # else the peer says so, of something else
    if isinstance(error, GpuPathLost):
        # What the GPU may write to is not used for other bytes.
        return error.is_quiet or not selecting.targets
    return isinstance(error, EntryAborted) and error.reason != "taken"


async def _give_back(
    selecting: Selecting, delivery: Delivery, error: BaseException
) -> None:
    """The application is done with it, but by an error, or cancelled."""
    selecting.give_back(delivery, reached=isinstance(error, Exception))
    await selecting.quiesce()


def _who_waits(selecting: Selecting) -> str:
    key = selecting.query.key
    tokens = "any" if key is None else len(key) // TOKEN_NBYTES
    return f"drop_select of {tokens} tokens"

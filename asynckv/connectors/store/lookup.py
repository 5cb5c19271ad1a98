"""Asks a store what it has of prompts, and holds that there until it is loaded.

A store that is silent is waited for once; then nobody waits for it until it answers.
Engines that are cut otherwise than those whose KV it has hear that they are.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Sequence
from typing import Final

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.connections import StoreConnection
from asynckv.connectors.engine import (
    SHAPE_KEY,
    KVEngine,
    StoredShape,
    keys_of_ranks,
    namespace_of,
)
from asynckv.connectors.options import ConnectorOptions
from asynckv.errors import AsyncKVError, PeerLost
from asynckv.waits.waiting import PlainTaskGroup, wait_shielded

__all__ = ("PrefixLookup", "StorePins")

logger = logging.getLogger(__name__)

_NOT_HELD: Final = "what is found is not held any more"


class StorePins:
    """Pins what is found for ``seconds``: not evicted before its load can pin it.

    Of more than ``at_most`` at once the oldest are let go: those that are found, for
    who still asks has nothing yet.
    """

    def __init__(self, seconds: float, at_most: int) -> None:
        self._seconds = seconds
        self._at_most = at_most
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[int, tuple[asyncio.Task[None], KVStoreBuffer]] = {}
        self._is_closing = False

    def __len__(self) -> int:
        """How many are held, and not about to be let go."""
        return len(self._held)

    def store_of(self, number: int) -> KVStoreBuffer | None:
        """Return where that is held; ``None`` if it is not. From any thread."""
        held = self._held.get(number)
        return None if held is None else held[1]

    async def hold(
        self, store: KVStoreBuffer, keys: Sequence[str], within_s: float, number: int
    ) -> tuple[bool, ...]:
        """Say which of ``keys`` are there, up to the first that is not; those stay.

        What a lower tier of the store has is there if it comes ``within_s`` seconds. By
        ``number``, which no other hold has, they are let go again. A cancelled call
        holds none.

        :raises PeerLost: the store is gone, or this is closed
        """
        if self._is_closing:
            raise PeerLost(_NOT_HELD)
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[bool, ...]] = loop.create_future()
        task = loop.create_task(
            self._keep(store, keys, within_s, found, number),
            name="asynckv: blocks that were found",
        )
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, found, number))
        try:
            return await found
        except asyncio.CancelledError:
            task.cancel()
            await wait_shielded(task)
            raise

    def let_go(self, number: int) -> None:
        """Let what is held by this number go soon; of another, nothing. Never waits."""
        if (held := self._held.pop(number, None)) is not None:
            held[0].cancel()  # it takes its time to end

    async def release(self) -> None:
        """Let all go. A cancellation is held back until then."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await wait_shielded(asyncio.gather(*tasks, return_exceptions=True))

    async def aclose(self) -> None:
        """Let all go, and hold nothing more. A cancellation is held back until then."""
        self._is_closing = True
        await self.release()

    def abort(self) -> None:
        """Let all go soon, and hold nothing more. Never waits."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()

    async def _keep(
        self,
        store: KVStoreBuffer,
        keys: Sequence[str],
        within_s: float,
        found: asyncio.Future[tuple[bool, ...]],
        number: int,
    ) -> None:
        try:
            async with store.pin(keys, within_s=within_s, prefix=True) as there:
                if not found.done():
                    self._make_room(number, store)
                    found.set_result(there)
                    await asyncio.sleep(self._seconds)
        except (AsyncKVError, OSError) as exc:
            if not found.done():
                found.set_exception(exc)
            else:
                logger.debug("what was found is held no longer: %s", exc)

    def _make_room(self, number: int, store: KVStoreBuffer) -> None:
        """The task that calls this holds something now: let the oldest go for it."""
        if (task := asyncio.current_task()) is not None:
            self._held[number] = task, store
        while len(self._held) > self._at_most:
            self.let_go(next(iter(self._held)))

    def _ended(
        self,
        task: asyncio.Task[None],
        found: asyncio.Future[tuple[bool, ...]],
        number: int,
    ) -> None:
        self._tasks.discard(task)
        if number in self._held and self._held[number][0] is task:
            del self._held[number]
        if not found.done():  # it was cancelled before it had an answer
            found.set_exception(PeerLost(_NOT_HELD))


_PROBE_EVERY_S: Final = 1.0
_LET_GO_EVERY_S: Final = 0.25
_HELD_S: Final = 10.0
_MOST_HELD: Final = 1024


class PrefixLookup:
    """Asks a store for the parts of all ranks of an engine, and holds what is there."""

    def __init__(
        self, config: KVTransferConfig, engine: KVEngine, store: KVStoreBuffer | None
    ) -> None:
        self.line = StoreConnection(config, engine, store, "scheduler")
        self.holds = StorePins(_HELD_S, _MOST_HELD)
        self.refused = ""
        """Why what another engine has saved there is of no use here."""
        self._engine = engine
        self._namespace = namespace_of(engine)
        options = ConnectorOptions.of(config)
        self._shape = StoredShape.of(engine, options.chunk_of(engine.block_size))
        self._answer_s = options.lookup_timeout_s
        self._fetch_s = options.fetch_timeout_s
        self._is_silent = self._is_closed = False
        self._probing: asyncio.Task[None] | None = None
        self._unneeded: collections.deque[int] = collections.deque()
        self._letting_go: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to dial, so that the first prompt need not wait for it. Never waits."""
        self._probe_soon()

    def let_go(self, number: int) -> None:
        """What was found by a lookup is not needed any more: hold it no longer.

        From any thread. Never waits, and wakes no loop: that looks now and then.
        """
        self._unneeded.append(number)

    def is_held(self, number: int) -> bool:
        """Whether what a lookup found is still held, by the link that is up now.

        From any thread.
        """
        store = self.holds.store_of(number)
        return store is not None and store is self.line.connected

    async def find(self, keys: tuple[str, ...], number: int = 0) -> int:
        """Say how many of these values, from the first on, are there for every rank.

        They are held until :meth:`let_go` of ``number``, or for 10 s. A call that is
        cancelled, or fails, holds nothing.

        :raises AsyncKVError: the store does not answer, or has not since it was silent
        :raises OSError: so it is too
        :raises TimeoutError: it was silent for ``lookup_timeout_s``
        """
        self._let_go()
        if self._is_silent:
            raise PeerLost(f"{self.line.url} has been silent", hint="it is asked again")
        try:
            async with asyncio.timeout(self._answer_s) as limit:
                try:
                    found = await self._find(keys, limit, number)
                except BaseException:
                    self.holds.let_go(number)
                    raise
        except TimeoutError:
            self._is_silent = True
            self._on_lost(f"no answer within {self._answer_s:g} s (lookup_timeout_s)")
            raise
        except (AsyncKVError, OSError) as exc:
            self._on_lost(str(exc) or type(exc).__name__)
            raise
        self._on_answer()
        return found

    async def aclose(self) -> None:
        """Hold nothing more, and say goodbye. Bounded and shielded."""
        self._is_closed = True
        try:
            if (probing := self._probing) is not None:
                probing.cancel()
                await wait_shielded(probing)
            await self.holds.aclose()
        finally:
            await self.line.aclose()

    def abort(self) -> None:
        """Hold nothing more, and hang up. Never waits."""
        self._is_closed = True
        if self._probing is not None:
            self._probing.cancel()
        self.holds.abort()
        self.line.abort()

    async def _find(
        self, keys: tuple[str, ...], limit: asyncio.Timeout, number: int
    ) -> int:
        store = await self.line.store()
        async with PlainTaskGroup() as group:
            # At once: the first answer says that the store is alive.
            shape = group.create_task(store.get(SHAPE_KEY))
            holding = group.create_task(self._hold(store, keys, number))
            await asyncio.wait({shape, holding}, return_when=asyncio.FIRST_COMPLETED)
            now_s = asyncio.get_running_loop().time()
            limit.reschedule(now_s + self._fetch_s + self._answer_s)
            if found := await holding:
                shape.cancel()
        if not found:
            self._compare(shape.result())
        return found

    def _let_go(self) -> None:
        while self._unneeded:
            self.holds.let_go(self._unneeded.popleft())

    def _let_go_later(self) -> None:
        """Do so while anything is held, though nobody asks for anything."""
        if self._letting_go is None and len(self.holds) and not self._is_closed:
            loop = asyncio.get_running_loop()
            self._letting_go = loop.call_later(_LET_GO_EVERY_S, self._let_go_now)

    def _let_go_now(self) -> None:
        self._letting_go = None
        self._let_go()
        self._let_go_later()

    def _on_lost(self, why: str) -> None:
        if not self._is_closed:
            self.line.note_lost(why)
            self._probe_soon()

    def _on_answer(self) -> None:
        self._is_silent = False
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None
        self.line.note_answer()

    def _probe_soon(self) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(
                self._probe(), name=f"asynckv: wait for {self.line.url}"
            )

    async def _probe(self) -> None:
        """Ask until there is an answer. Who is silent is not asked a second time."""
        while not self._is_closed:
            try:
                store = await self.line.store()
                await store.contains((SHAPE_KEY,))
            except (AsyncKVError, OSError) as exc:
                self._on_lost(str(exc) or type(exc).__name__)
                await asyncio.sleep(_PROBE_EVERY_S)
            else:
                self._probing = None
                self._on_answer()
                break

    async def _hold(
        self, store: KVStoreBuffer, keys: tuple[str, ...], number: int
    ) -> int:
        """Say how many are there for every rank; they stay until a load can begin.

        The first values of all ranks come first, where they come from far.
        """
        ranks = range(self._engine.size)
        in_turn = await keys_of_ranks(keys, self._namespace, ranks)
        there = await self.holds.hold(store, in_turn, self._fetch_s, number)
        self._let_go_later()
        found = (*there, False).index(False) // self._engine.size
        if not found:
            self.holds.let_go(number)
        return found

    def _compare(self, shape: torch.Tensor | None) -> None:
        """Nothing was found: perhaps because who saves there is cut otherwise."""
        there = StoredShape.read(shape)
        refused = "" if there is None else there.differs_from(self._shape)
        if refused and refused != self.refused:
            logger.warning("what the store has is not for this engine: %s", refused)
        self.refused = refused

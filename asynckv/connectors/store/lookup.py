"""Which blocks of prompts a store has. They stay there until a load can begin.

A store that is silent is waited for once; then nobody waits for it until it answers.
Engines that are cut otherwise than those whose blocks it has hear that they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Final

import msgspec
import torch

from asynckv.abc import KVStoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.connections import StoreConnection
from asynckv.connectors.engine import KVEngine, rank_block_keys
from asynckv.connectors.options import ConnectorOptions
from asynckv.errors import AsyncKVError, PeerLost
from asynckv.parallel.shapes import EngineShape
from asynckv.shielding import wait_shielded

__all__ = (
    "SHAPE_KEY",
    "PrefixLookup",
    "StorePins",
    "StoredShape",
    "namespace_of",
)


SHAPE_KEY: Final = "asynckv/shape"
"""Where those who save say how their blocks are cut."""

_MAX_NBYTES: Final = 64 * 1024


class StoredShape(msgspec.Struct, frozen=True, kw_only=True):
    """How the blocks of an engine are cut, as it says itself."""

    tp_size: int
    size: int
    block_size: int
    shape: EngineShape | None = None

    @classmethod
    def of(cls, engine: KVEngine) -> StoredShape:
        """Return what an engine says."""
        return cls(
            tp_size=engine.tp_size,
            size=engine.size,
            block_size=engine.block_size,
            shape=engine.shape,
        )

    @classmethod
    def read(cls, value: torch.Tensor | None) -> StoredShape | None:
        """Return what a store says; ``None`` if that is nothing of the kind."""
        if value is None or value.dtype != torch.uint8 or value.nbytes > _MAX_NBYTES:
            return None
        try:
            return msgspec.msgpack.decode(value.numpy().tobytes(), type=cls)
        except (msgspec.MsgspecError, ValueError, TypeError):
            return None

    def tensor(self) -> torch.Tensor:
        """Return it as a value of a store."""
        return torch.frombuffer(
            bytearray(msgspec.msgpack.encode(self)), dtype=torch.uint8
        )

    def differs_from(self, engine: KVEngine) -> str:
        """Say in what; nothing if its blocks can be loaded by ``engine``."""
        ours = StoredShape.of(engine)
        if self == ours:
            return ""
        named = [
            f"{name}={getattr(self, name)} there and {getattr(ours, name)} here"
            for name in ("tp_size", "block_size")
            if getattr(self, name) != getattr(ours, name)
        ]
        return ", ".join(named) or "heads, layers or layout are others"


def namespace_of(engine: KVEngine) -> str:
    """Return what is equal for engines whose ranks can read each other's blocks."""
    told = msgspec.msgpack.encode((engine.size, engine.tp_size, engine.shape))
    return hashlib.blake2b(told, digest_size=8).hexdigest()


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
        self._held: dict[asyncio.Task[None], None] = {}
        self._is_closing = False

    def __len__(self) -> int:
        """How many are held, and not about to be let go."""
        return len(self._held)

    async def hold(self, store: KVStoreBuffer, keys: Sequence[str]) -> tuple[bool, ...]:
        """Say which of ``keys`` are there; those stay. A cancelled call holds none.

        :raises PeerLost: the store is gone, or this is closed
        """
        if self._is_closing:
            raise PeerLost(_NOT_HELD)
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[bool, ...]] = loop.create_future()
        task = loop.create_task(
            self._keep(store, keys, found), name="asynckv: blocks that were found"
        )
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, found))
        try:
            return await found
        except asyncio.CancelledError:
            task.cancel()
            await wait_shielded(task)
            raise

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
        found: asyncio.Future[tuple[bool, ...]],
    ) -> None:
        try:
            async with store.pin(keys) as there:
                if not found.done():
                    self._make_room()
                    found.set_result(there)
                    await asyncio.sleep(self._seconds)
        except (AsyncKVError, OSError) as exc:
            if not found.done():
                found.set_exception(exc)
            else:
                logger.debug("what was found is held no longer: %s", exc)

    def _make_room(self) -> None:
        """The task that calls this holds something now: let the oldest go for it."""
        if (task := asyncio.current_task()) is not None:
            self._held[task] = None
        while len(self._held) > self._at_most:
            oldest = next(iter(self._held))
            del self._held[oldest]  # now: cancelled, it takes its time to end
            oldest.cancel()

    def _ended(
        self, task: asyncio.Task[None], found: asyncio.Future[tuple[bool, ...]]
    ) -> None:
        self._tasks.discard(task)
        self._held.pop(task, None)
        if not found.done():  # it was cancelled before it had an answer
            found.set_exception(PeerLost(_NOT_HELD))


_PROBE_EVERY_S: Final = 1.0
_HELD_S: Final = 10.0
_MOST_HELD: Final = 256


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
        self._answer_s = ConnectorOptions.of(config).lookup_timeout_s
        self._is_silent = self._is_closed = False
        self._probing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to dial, so that the first prompt need not wait for it. Never waits."""
        self._probe_soon()

    async def find(self, keys: tuple[str, ...]) -> int:
        """Say how many of these blocks, from the first on, are there for every rank.

        A cancelled call holds nothing.

        :raises AsyncKVError: the store does not answer, or has not since it was silent
        :raises OSError: so it is too
        :raises TimeoutError: it was silent for ``lookup_timeout_s``
        """
        if self._is_silent:
            raise PeerLost(f"{self.line.url} has been silent", hint="it is asked again")
        try:
            async with asyncio.timeout(self._answer_s) as limit:
                found = await self._find(keys, limit)
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

    async def _find(self, keys: tuple[str, ...], limit: asyncio.Timeout) -> int:
        store, counts = await self.line.store(), []
        for rank in range(self._engine.size):
            rank_keys = rank_block_keys(keys, self._namespace, rank)
            counts.append(await store.match_prefix(rank_keys))
            self._go_on(limit)
        if not (found := min(counts)):
            await self._compare(store)
            return 0
        return await self._hold(store, keys[:found])

    def _go_on(self, limit: asyncio.Timeout) -> None:
        """An answer came: so much time has the next one."""
        limit.reschedule(asyncio.get_running_loop().time() + self._answer_s)

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

    async def _hold(self, store: KVStoreBuffer, keys: tuple[str, ...]) -> int:
        """Say how many are there for every rank; they stay until a load can begin."""
        ranks, count = range(self._engine.size), len(keys)
        all_keys = [rank_block_keys(keys, self._namespace, rank) for rank in ranks]
        there = await self.holds.hold(store, [key for part in all_keys for key in part])
        parts = [there[rank * count : (rank + 1) * count] for rank in ranks]
        return min((*part, False).index(False) for part in parts)

    async def _compare(self, store: KVStoreBuffer) -> None:
        """Nothing was found: perhaps because who saves there is cut otherwise."""
        there = StoredShape.read(await store.get(SHAPE_KEY))
        refused = "" if there is None else there.differs_from(self._engine)
        if refused and refused != self.refused:
            logger.warning("blocks in the store are not for this engine: %s", refused)
        self.refused = refused

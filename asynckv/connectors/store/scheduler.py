"""The scheduler side of a store connector: what of prompts is there, what goes there.

What is found stays there until a load can begin. A store that is silent is waited for
once; then nobody waits for it until it answers. Engines that are cut otherwise than
those whose KV it has hear that they are.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Final

from asynckv.abc import (
    AsksElsewhere,
    BlockIds,
    KVAnswer,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorStep,
    KVQuestion,
    KVRequest,
    KVScheduled,
    KVStoreBuffer,
    KVTransferResults,
    SupportsHMA,
)
from asynckv.config import KVLoadFailurePolicy, KVTransferConfig
from asynckv.connectors.connections import StoreConnection
from asynckv.connectors.engine import (
    SHAPE_KEY,
    KVEngine,
    PrefixKeys,
    StoredShape,
    namespace_of,
    rank_block_keys,
)
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.requests import (
    StoreMetadata,
    StoreRequest,
    refusal_of_blocks,
)
from asynckv.connectors.transfers import ExpectedLoads, TransferCounters
from asynckv.errors import AsyncKVError, PeerLost
from asynckv.loops import LoopBound, ThreadBound
from asynckv.shielding import wait_shielded
from asynckv.waits.own_tasks import PlainTaskGroup

__all__ = (
    "PrefixLookup",
    "StorePins",
    "StoreScheduler",
    "StoreSchedulerStatistics",
)

logger = logging.getLogger(__name__)

_FRESH_S: Final = 4.0
_MOST_ASKED: Final = 8


@dataclasses.dataclass(slots=True)
class _Known:
    """A request until it is finished. ``stored`` values from its start are known of."""

    request: KVRequest
    keys: tuple[str, ...]
    number: int
    is_asked: bool = False
    stored: int | None = None
    answered_s: float = 0.0
    link: object = None
    held: int | None = None
    times_asked: int = 0
    question: int = -1
    is_loaded: bool = False
    has_load: bool = False
    saved: int = 0

    def is_held(self, link: object) -> bool:
        """Whether what was found still is: not long ago, and by this link."""
        is_fresh = time.monotonic() - self.answered_s <= _FRESH_S
        return is_fresh and self.link is link

    def forget_answer(self) -> None:
        """What was found is held no longer: ask again, but not for ever."""
        is_asked_again = self.times_asked < _MOST_ASKED
        self.is_asked, self.saved = not is_asked_again, 0
        self.stored = None if is_asked_again else 0


@dataclasses.dataclass(frozen=True)
class StoreSchedulerStatistics:
    """Requests, questions to the store, and what was said of loads in vain.

    ``refused`` says why what another engine has saved there is of no use here.
    ``is_reachable``: the store is connected, and its last answer came in time; ``None``
    where nothing is looked up.
    """

    requests: int
    loading: int
    asked: int
    hit_blocks: int
    unanswered: int
    transfers: TransferCounters
    refused: str = ""
    is_reachable: bool | None = None


class StoreScheduler(
    LoopBound, ThreadBound, KVConnectorScheduler, AsksElsewhere, SupportsHMA
):
    """Looks prompts up in a store, chunk by chunk of its tokens, and saves new chunks.

    A value is the KV of ``chunk_tokens`` tokens; what a prompt has beyond its last
    whole chunk is not stored. Of a chunk of which the engine has a part the blocks that
    it lacks are loaded.

    Until its question is answered a request is "ask again". A store that does not
    answer within ``lookup_timeout_s`` has nothing, and is not asked again before it
    answers; that it is lost, and is back, is logged. What is found is held in the
    store until it is loaded, for 10 s at most, so that it is not evicted before; a
    request that waits longer, or beyond the end of the link, is asked for again. KV of
    an engine with other ranks, block or chunk size, or layout is not loaded, which is
    logged once. ``KVRequest.salt`` keeps the KV of some requests from others.

    :raises ConfigError: no store or fingerprint is configured, or ``chunk_tokens`` are
        no whole blocks
    """

    def __init__(
        self,
        config: KVTransferConfig,
        engine: KVEngine,
        store: KVStoreBuffer | None = None,
    ) -> None:
        self.engine = engine
        self.load_failure_policy: KVLoadFailurePolicy = config.kv_load_failure_policy
        options = ConnectorOptions.of(config)
        self._chunk_tokens = options.chunk_of(engine.block_size)
        self._value_blocks = self._chunk_tokens // engine.block_size
        self._keys = PrefixKeys(self._chunk_tokens, config.fingerprint)
        self._is_consumer = config.is_kv_consumer
        self._is_producer = config.is_kv_producer
        self.finder = PrefixLookup(config, engine, store)
        self._requests: dict[str, _Known] = {}
        self._questions: list[KVQuestion] = []
        self._pending_loads: list[StoreRequest] = []
        self._loads = ExpectedLoads()
        self._seen = self._asked = self._hit_blocks = self._unanswered = 0

    async def start(self) -> None:
        """Begin to dial the store; nobody waits for it, and it need not be there."""
        self._check_loop()
        if self._is_consumer:
            self.finder.start()

    def on_new_request(self, request: KVRequest) -> None:
        self._check_thread()
        self._ask_for(self._known(request))

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._check_thread()
        known = self._known(request)
        if not self._loads.are_free(request.request_id):
            return None, False  # an older load of that id is not quiet yet
        if known.is_loaded or not self._is_consumer or not known.keys:
            return 0, False
        if known.stored and not known.is_held(self.finder.line.link):
            known.forget_answer()
        self._ask_for(known)
        if known.stored is None:
            return None, False
        count = known.stored * self._chunk_tokens - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def take_questions(self) -> tuple[KVQuestion, ...]:
        self._check_thread()
        questions, self._questions = self._questions, []
        return tuple(questions)

    async def ask(self, question: KVQuestion) -> KVAnswer:
        self._check_loop()
        num_keys = 0
        try:
            num_keys = await self.finder.find(question.keys, question.number)
        except (AsyncKVError, OSError, TimeoutError) as exc:
            self._unanswered += 1
            logger.debug("the store does not answer: %s", exc)
        return question.answered(num_keys)

    def take_answer(self, answer: KVAnswer) -> None:
        self._check_thread()
        known = self._requests.get(answer.request_id)
        if known is None or known.question != answer.number:
            self.finder.let_go(answer.number)
            return  # it was asked for a request of that id before
        if known.stored is None:
            known.stored = max(0, min(answer.num_keys, len(known.keys)))
            known.answered_s = time.monotonic()
            known.link = self.finder.line.link
            self._let_go(known)  # what was found before stays until now
            known.held = answer.number
            self._hit_blocks += known.stored * self._value_blocks
            known.saved = max(known.saved, known.stored)

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self._check_thread()
        known = self._known(request)
        if known.is_loaded:
            return
        known.is_loaded = True
        if num_external_tokens <= 0 or not known.stored:
            return
        end_token = known.stored * self._chunk_tokens
        first = (end_token - num_external_tokens) // self.engine.block_size
        end = known.stored * self._value_blocks
        blocks = tuple(group[first:end] for group in block_ids)
        load = StoreRequest(
            request.request_id,
            known.keys[first // self._value_blocks : known.stored],
            blocks,
            first,
            refusal_of_blocks(blocks, end - first),
        )
        if self._loads.begin(request.request_id, load.block_ids):
            known.has_load = True
            self._pending_loads.append(load)

    def build_connector_meta(self, step: KVConnectorStep) -> KVConnectorMetadata:
        self._check_thread()
        saves = [request for each in step.scheduled if (request := self._save_of(each))]
        loads, self._pending_loads = self._pending_loads, []
        return StoreMetadata(tuple(loads), tuple(saves), self._loads.take_aborts())

    def update_connector_output(self, results: KVTransferResults) -> KVTransferResults:
        self._check_thread()
        believed = self._loads.settle(results)
        for request_id in believed.finished_recving:
            if (known := self._requests.get(request_id)) is not None:
                self._let_go(known)
        for request_id in believed.failed_recving:
            if (known := self._requests.get(request_id)) is not None:
                known.saved = 0  # what is computed instead may be stored again
        return believed

    def request_finished(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        self._check_thread()
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return False, None
        self._let_go(known)
        if not known.has_load:
            return False, None
        return self._loads.abort(request.request_id), None

    def request_finished_all_groups(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        return self.request_finished(request, block_ids)

    def has_pending_work(self) -> bool:
        return bool(self._pending_loads or self._loads.has_aborts or len(self._loads))

    def statistics(self) -> StoreSchedulerStatistics:
        return StoreSchedulerStatistics(
            requests=len(self._requests),
            loading=len(self._loads),
            asked=self._asked,
            hit_blocks=self._hit_blocks,
            unanswered=self._unanswered,
            transfers=dataclasses.replace(self._loads.counters),
            refused=self.finder.refused,
            is_reachable=self.finder.line.is_reachable if self._is_consumer else None,
        )

    def shutdown(self) -> None:
        self._requests.clear()
        self._pending_loads.clear()
        self._questions.clear()
        self._loads.clear()

    async def aclose(self) -> None:
        self._check_loop()
        await self.finder.aclose()

    def abort(self) -> None:
        self.finder.abort()

    def _known(self, request: KVRequest) -> _Known:
        known = self._requests.get(request.request_id)
        if known is None:
            keys = self._keys.of(request.token_ids, request.salt)
            known = _Known(request, keys, self._seen)
            self._requests[request.request_id] = known
            self._seen += 1
        return known

    def _let_go(self, known: _Known) -> None:
        """What was found need not stay for it any more."""
        if known.held is not None:
            self.finder.let_go(known.held)
            known.held = None

    def _ask_for(self, known: _Known) -> None:
        if self._is_consumer and known.keys and not known.is_asked:
            known.is_asked = True
            known.times_asked += 1
            known.question = self._asked
            self._asked += 1
            request_id = known.request.request_id
            self._questions.append(
                KVQuestion(request_id, known.keys, number=known.question)
            )

    def _save_of(self, scheduled: KVScheduled) -> StoreRequest | None:
        known = self._requests.get(scheduled.request_id)
        if known is None or not self._is_producer:
            return None
        computed = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        end = min(computed // self._chunk_tokens, len(known.keys))
        first, known.saved = known.saved, max(known.saved, end)
        if first >= end:
            return None
        blocks = slice(first * self._value_blocks, end * self._value_blocks)
        return StoreRequest(
            scheduled.request_id,
            known.keys[first:end],
            tuple(group[blocks] for group in scheduled.block_ids),
            blocks.start,
            number=known.number,
        )


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
        self._held: dict[int, asyncio.Task[None]] = {}
        self._is_closing = False

    def __len__(self) -> int:
        """How many are held, and not about to be let go."""
        return len(self._held)

    async def hold(
        self, store: KVStoreBuffer, keys: Sequence[str], within_s: float, number: int
    ) -> tuple[bool, ...]:
        """Say which of ``keys`` are there; those stay. A cancelled call holds none.

        What a lower tier of the store has is there if it comes ``within_s`` seconds.
        By ``number``, which no other hold has, they are let go again.

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
        if (task := self._held.pop(number, None)) is not None:
            task.cancel()  # it takes its time to end

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
            async with store.pin(keys, within_s=within_s) as there:
                if not found.done():
                    self._make_room(number)
                    found.set_result(there)
                    await asyncio.sleep(self._seconds)
        except (AsyncKVError, OSError) as exc:
            if not found.done():
                found.set_exception(exc)
            else:
                logger.debug("what was found is held no longer: %s", exc)

    def _make_room(self, number: int) -> None:
        """The task that calls this holds something now: let the oldest go for it."""
        if (task := asyncio.current_task()) is not None:
            self._held[number] = task
        while len(self._held) > self._at_most:
            self.let_go(next(iter(self._held)))

    def _ended(
        self,
        task: asyncio.Task[None],
        found: asyncio.Future[tuple[bool, ...]],
        number: int,
    ) -> None:
        self._tasks.discard(task)
        if self._held.get(number) is task:
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

    async def find(self, keys: tuple[str, ...], number: int = 0) -> int:
        """Say how many of these values, from the first on, are there for every rank.

        They are held until :meth:`let_go` of ``number``, or for 10 s. A cancelled call
        holds nothing.

        :raises AsyncKVError: the store does not answer, or has not since it was silent
        :raises OSError: so it is too
        :raises TimeoutError: it was silent for ``lookup_timeout_s``
        """
        if self._is_silent:
            raise PeerLost(f"{self.line.url} has been silent", hint="it is asked again")
        self._let_go()
        try:
            async with asyncio.timeout(self._answer_s) as limit:
                found = await self._find(keys, limit, number)
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
            asking = [
                group.create_task(store.match_prefix(rank_keys))
                for rank_keys in self._keys_of_ranks(keys)
            ]
        if not (found := min(one.result() for one in asking)):
            self._go_on(limit, 0.0)
            await self._compare(store)
            return 0
        self._go_on(limit, self._fetch_s)
        return await self._hold(store, keys[:found], number)

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

    def _go_on(self, limit: asyncio.Timeout, work_s: float) -> None:
        """An answer came: so much time has the next one, beside what it has to do."""
        now_s = asyncio.get_running_loop().time()
        limit.reschedule(now_s + work_s + self._answer_s)

    def _keys_of_ranks(self, keys: tuple[str, ...]) -> list[list[str]]:
        return [
            rank_block_keys(keys, self._namespace, rank)
            for rank in range(self._engine.size)
        ]

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
        values = zip(*self._keys_of_ranks(keys), strict=True)
        in_turn = [key for value in values for key in value]
        there = await self.holds.hold(store, in_turn, self._fetch_s, number)
        self._let_go_later()
        return (*there, False).index(False) // self._engine.size

    async def _compare(self, store: KVStoreBuffer) -> None:
        """Nothing was found: perhaps because who saves there is cut otherwise."""
        there = StoredShape.read(await store.get(SHAPE_KEY))
        refused = "" if there is None else there.differs_from(self._shape)
        if refused and refused != self.refused:
            logger.warning("what the store has is not for this engine: %s", refused)
        self.refused = refused

"""The scheduler side of a store connector: what of prompts is there, what goes there.

What is found stays there until a load can begin.
"""

from __future__ import annotations

import dataclasses
import logging
import time
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
from asynckv.affinity import LoopBound, ThreadBound
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import (
    KVEngine,
    PrefixKeys,
)
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.requests import (
    StoreMetadata,
    StoreRequest,
    refusal_of_blocks,
)
from asynckv.connectors.store.lookup import PrefixLookup
from asynckv.connectors.transfers import ExpectedLoads, TransferCounters
from asynckv.errors import AsyncKVError

__all__ = (
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
    held: int | None = None
    times_asked: int = 0
    question: int = -1
    is_loaded: bool = False
    has_load: bool = False
    saved: int = 0

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
        options = ConnectorOptions.of(config)
        self._chunk_tokens = options.chunk_of(engine.block_size)
        self._value_blocks = self._chunk_tokens // engine.block_size
        self._keys = PrefixKeys(self._chunk_tokens, config.fingerprint)
        self._is_consumer = config.is_kv_consumer
        self._is_producer = config.is_kv_producer
        self.finder = PrefixLookup(config, engine, store)
        self._requests: dict[str, _Known] = {}
        self._found_s: dict[int, float] = {}
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
        if known.is_asked and known.stored is None and not known.is_loaded:
            return None, False  # as most often: many are asked of in every step
        if not self._loads.are_free(request.request_id):
            return None, False  # an older load of that id is not quiet yet
        if known.is_loaded or not self._is_consumer or not known.keys:
            return 0, False
        if known.stored and not self._is_held(known):
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
            # The answer may be taken long after.
            self._found_s[question.number] = time.monotonic()
        except (AsyncKVError, OSError, TimeoutError) as exc:
            self._unanswered += 1
            logger.debug("the store does not answer: %s", exc)
        return question.answered(num_keys)

    def take_answer(self, answer: KVAnswer) -> None:
        self._check_thread()
        known = self._requests.get(answer.request_id)
        answered_s = self._found_s.pop(answer.number, 0.0)
        if known is None or known.question != answer.number:
            self.finder.let_go(answer.number)
            return  # it was asked for a request of that id before
        if known.stored is None:
            known.stored = max(0, min(answer.num_keys, len(known.keys)))
            known.answered_s = answered_s
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
                if request_id in believed.failed_recving:
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
        self._found_s.clear()
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

    def _is_held(self, known: _Known) -> bool:
        """Whether what was found for it still is, and will be until it is loaded."""
        is_fresh = time.monotonic() - known.answered_s <= _FRESH_S
        return is_fresh and known.held is not None and self.finder.is_held(known.held)

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

"""What the connector of vLLM's scheduler does: turns its words into asynckv's.

Plain functions, in every step: of requests that move nothing nothing is looked at.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from asynckv.abc import (
    AsksElsewhere,
    BlockIds,
    KVAnswer,
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorStep,
    KVQuestion,
    KVRequest,
    KVScheduled,
    KVTransferResults,
    TakesHandshakes,
)
from asynckv.integrations.bridge import Bridge
from asynckv.integrations.vllm.counts import gauges_of, saved_by

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ("BlockIdsOf", "SchedulerRole")

logger = logging.getLogger("vllm.asynckv")  # vLLM shows only what is below "vllm"

_Blocks: TypeAlias = Sequence[Sequence[int]]
BlockIdsOf: TypeAlias = Callable[[str], _Blocks]

_START_S: Final = 30.0
_LOOK_EVERY_S: Final = 1.0
_REMEMBERED: Final = 4096
_NO_STEP: Final = KVConnectorStep()
_NOBODY: Final = frozenset[str]()
_WITHOUT_ANSWER: Final = ("FINISHED_ABORTED", "FINISHED_ERROR")


class SchedulerRole:
    """Asks a :class:`~asynckv.abc.KVConnectorScheduler` on behalf of vLLM's.

    vLLM falls over a completion that it does not expect. So blocks of a saved request
    are held exactly until its save is quiet, and whatever else comes is dropped. Where
    workers do not tell of saves no blocks are held: before vLLM may overwrite them the
    workers are told to wait until they are not read any more.
    """

    def __init__(
        self,
        connector: KVConnectorScheduler,
        *,
        sees_all: bool,
        reports_saves: bool = True,
    ) -> None:
        self._connector = connector
        self._reports_saves = reports_saves
        self._sees_all = sees_all
        self._requests: dict[str, KVRequest] = {}
        # Prompts of which a part is still to be computed.
        self._computing: set[str] = set()
        # Those whose blocks a save may read, and the finished ones among them.
        self._saving: set[str] = set()
        self._held: set[str] = set()
        # Where no blocks are held: whose may be read, and who has finished of them
        # since the last step.
        self._read: set[str] = set()
        self._freed: set[str] = set()
        # What ranks said of requests that have not ended on all of them.
        self._failures: dict[tuple[str, str], str] = {}
        self._began: dict[str, float] = {}
        self._counts: dict[str, Any] = {}
        self._told_gauges: dict[str, int] = {}
        self.dropped = 0
        self._asking: _Asking | None = None
        if isinstance(connector, AsksElsewhere):
            self._asking = _Asking(connector, connector.statistics)

    @property
    def held(self) -> int:
        """How many finished requests have blocks that are still read."""
        return len(self._held)

    def on_new_request(self, request: Request) -> None:
        """Take note of it, if it may move anything."""
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return  # embeddings, or some: nothing tells two of them apart
        if self._sees_all or request.kv_transfer_params:
            ours = _request_of(request)
            self._requests[ours.request_id] = ours
            self._computing.add(ours.request_id)
            self._connector.on_new_request(ours)

    def matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens come from elsewhere, ``None`` for "ask again"."""
        ours = self._requests.get(request.request_id)
        if ours is None:
            return 0, False
        if self._asking is not None:
            self._asking.take_answers()
        return self._connector.get_num_new_matched_tokens(ours, num_computed_tokens)

    def allocated(
        self,
        request: Request,
        block_ids: Callable[[], _Blocks],
        num_external_tokens: int,
    ) -> None:
        """Blocks are there, some of them perhaps to be filled from elsewhere."""
        ours = self._requests.get(request.request_id)
        if ours is not None:
            self._connector.update_state_after_alloc(
                ours, _as_ours(block_ids()), num_external_tokens
            )

    def orders(
        self, output: SchedulerOutput, block_ids: BlockIdsOf
    ) -> KVConnectorMetadata | None:
        """Return what workers do in this step, ``None`` for nothing.

        What has to be asked elsewhere is, all of the step at once: the loop is woken
        no more often.
        """
        if self._asking is not None:
            self._asking.ask()
        step = self._step_of(output, block_ids) if self._computing else _NO_STEP
        orders = self._connector.build_connector_meta(step)
        if orders == type(orders)():
            return None
        saved = saved_by(orders)
        if self._reports_saves:
            self._saving |= saved
            self._count(failed_saves=len(getattr(orders, "saves", ())) - len(saved))
        else:
            self._read |= saved
        for load in getattr(orders, "loads", ()):
            if load.block_ids:
                self._began[load.request_id] = time.monotonic()
        return orders

    def overwritten(self, preempted: Set[str]) -> frozenset[str]:
        """Return the requests whose blocks may be read, and overwritten in this step.

        That is of the ``preempted`` ones, and of those that have finished.
        """
        if not (preempted or self._freed):
            return _NOBODY
        self._computing.update(one for one in preempted if one in self._requests)
        freed, self._freed = self._freed, set()
        return frozenset((self._saving | self._read) & preempted | freed)

    def apply_results(
        self, ended: KVTransferResults, said: KVTransferResults
    ) -> tuple[set[str], set[str]]:
        """Return what vLLM may be told: ids of requests sent, and received.

        ``ended`` have requests on all ranks, of this connector or of another one beside
        it, which is left as it is; ``said`` is what our ranks say in this step.
        """
        for failed, way in (
            (said.failed_sending, "send"),
            (said.full_sending, "full"),
            (said.failed_recving, "recv"),
        ):
            for request_id in failed:
                reason = said.reasons.get(request_id, "")
                self._failures.setdefault((request_id, way), reason)
        results = self._ours(ended, said)
        believed = self._connector.update_connector_output(results)
        self._count_loads(believed)
        received = set(believed.finished_recving)
        self.dropped += len(results.finished_recving) - len(received)
        sent = self._release(results) if results.finished_sending else set()
        sent |= ended.finished_sending - results.finished_sending
        received |= ended.finished_recving - results.finished_recving
        for request_id in results.failed_sending:
            why = results.reasons.get(request_id, "")
            logger.warning("the KV of %s was not saved: %s", request_id, why)
        for request_id, reason in believed.reasons.items():
            logger.warning("the KV of %s did not come: %s", request_id, reason)
        return sent, received

    def finished(
        self, request: Request, block_ids: _Blocks
    ) -> tuple[bool, dict[str, object] | None]:
        """vLLM is done with a request, or it was aborted.

        Its blocks must stay as they are if the answer begins with ``True``.
        """
        ours = self._requests.pop(request.request_id, None)
        if ours is None:
            return False, None
        self._computing.discard(ours.request_id)
        if request.status.name in _WITHOUT_ANSWER:
            ours = msgspec.structs.replace(ours, is_aborted=True)
        is_saving = ours.request_id in self._saving
        self._saving.discard(ours.request_id)
        is_held, params = self._connector.request_finished(ours, _as_ours(block_ids))
        if is_saving:
            self._held.add(ours.request_id)
            is_held = True
        if ours.request_id in self._read:
            self._read.remove(ours.request_id)
            self._freed.add(ours.request_id)
        return is_held, params

    def take_counts(self) -> dict[str, Any] | None:
        """Return what was counted since the last call, if anything was."""
        gauges = {} if self._asking is None else self._asking.gauges
        if gauges != self._told_gauges:
            self._told_gauges = gauges
            self._counts["gauges"] = {"scheduler": gauges}
        if not self._counts:
            return None
        counts, self._counts = self._counts, {}
        return counts

    def take_handshakes(self, metadata: Mapping[int, KVConnectorHandshake]) -> None:
        """What the workers told once their caches were registered."""
        if isinstance(self._connector, TakesHandshakes):
            self._connector.set_handshake_metadata(metadata)

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping."""
        return bool(self._held) or self._connector.has_pending_work()

    def reset_cache(self) -> bool | None:
        """Forget what is cached elsewhere."""
        return self._connector.reset_cache()

    def shutdown(self) -> None:
        """May be called again."""
        self._connector.shutdown()
        if self._asking is not None:
            self._asking.shutdown()

    def _release(self, results: KVTransferResults) -> set[str]:
        """Saves have ended; return those whose blocks vLLM holds for them."""
        quiet = results.finished_sending & (self._saving | self._held)
        self._count(
            saves=len(quiet - results.failed_sending),
            failed_saves=len(quiet & results.failed_sending),
        )
        self.dropped += len(results.finished_sending) - len(quiet)
        held = self._held & quiet
        self._held -= quiet
        self._saving -= quiet
        return held

    def _count_loads(self, believed: KVTransferResults) -> None:
        if not believed.finished_recving:
            return
        now, ended = time.monotonic(), believed.finished_recving
        took = {one: now - self._began.pop(one, now) for one in ended}
        loaded = ended - believed.failed_recving
        self._count(
            loads=len(loaded),
            failed_loads=len(believed.failed_recving),
            load_seconds=[took[one] for one in loaded],
        )

    def _count(self, **counts: Any) -> None:
        for name, count in counts.items():
            if count:
                before = self._counts.get(name)
                self._counts[name] = count if before is None else before + count

    def _ours(
        self, ended: KVTransferResults, said: KVTransferResults
    ) -> KVTransferResults:
        """Return the ends that are of this connector, and what ranks said of them."""
        sent, received = ended.finished_sending, ended.finished_recving
        if sent:
            sent &= said.finished_sending | self._saving | self._held
        if received:
            received &= said.finished_recving | self._began.keys()
        if not self._failures:
            return KVTransferResults(finished_sending=sent, finished_recving=received)
        take = self._failures.pop
        lost = {
            one: why for one in sent if (why := take((one, "send"), None)) is not None
        }
        bad = {
            one: why
            for one in received
            if (why := take((one, "recv"), None)) is not None
        }
        while len(self._failures) > _REMEMBERED:  # of ranks that never came to an end
            del self._failures[next(iter(self._failures))]
        return KVTransferResults(
            finished_sending=sent,
            failed_sending=frozenset(lost),
            full_sending=frozenset(
                one for one in sent if take((one, "full"), None) is not None
            ),
            finished_recving=received,
            failed_recving=frozenset(bad),
            reasons={**lost, **bad},
        )

    def _step_of(
        self, output: SchedulerOutput, block_ids: BlockIdsOf
    ) -> KVConnectorStep:
        """Tell of those prompts whose computing has not been told to its end."""
        counts = output.num_scheduled_tokens
        ours = self._computing & counts.keys()
        if not ours:
            return _NO_STEP
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        told = [(one.req_id, one.num_computed_tokens) for one in new]
        if not ours.issubset([request_id for request_id, _ in told]):
            told += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        scheduled = []
        for request_id, before in told:
            if request_id not in ours:
                continue
            count = counts[request_id]
            ids = _as_ours(block_ids(request_id))
            scheduled.append(KVScheduled(request_id, ids, before, count))
            if before + count >= self._requests[request_id].num_tokens:
                self._computing.discard(request_id)
        return KVConnectorStep(tuple(scheduled))


class _Asking:
    """Puts a connector's questions to others, on a loop of its own."""

    def __init__(
        self, connector: AsksElsewhere, statistics: Callable[[], object]
    ) -> None:
        self.gauges: dict[str, int] = {}
        """What there is, as the loop saw it last: replaced, never changed."""
        self._connector = connector
        self._statistics = statistics
        self._bridge = Bridge[KVAnswer]("vllm scheduler")
        self._bridge.run(connector.start, timeout_s=_START_S)
        self._bridge.at_end(connector.aclose)
        self._bridge.start(self._recheck)

    def take_answers(self) -> None:
        """Give the connector the answers that have come. Never waits."""
        for answer in self._bridge.news():
            self._connector.take_answer(answer)

    def ask(self) -> None:
        """Hand over what the connector wants to know, all at once. Never waits."""
        if questions := self._connector.take_questions():
            self._bridge.start(self._ask_all, questions)

    def shutdown(self) -> None:
        """Ask nothing more, and join the thread. May be called again."""
        self._bridge.shutdown()

    async def _ask_all(self, questions: Sequence[KVQuestion]) -> None:
        await asyncio.gather(*map(self._ask, questions))
        self._look()

    async def _ask(self, question: KVQuestion) -> None:
        answer = question.answered(0)
        try:
            answer = await self._connector.ask(question)
        except Exception:
            # No request may be asked of for ever: nothing is known of it.
            logger.exception("nobody knows of %r", question.request_id)
        finally:
            self._bridge.tell(answer)

    async def _recheck(self) -> None:
        """Look at what there is, now and then: it changes while nobody asks."""
        while True:
            self._look()
            await asyncio.sleep(_LOOK_EVERY_S)

    def _look(self) -> None:
        self.gauges = gauges_of(self._statistics())


def _as_ours(block_ids: _Blocks) -> BlockIds:
    return tuple(map(tuple, block_ids))


def _request_of(request: Request) -> KVRequest:
    """Return it as asynckv knows it.

    What decides on its KV beside the tokens goes in the salt.
    """
    return KVRequest(
        request.request_id,
        tuple(request.prompt_token_ids or ()),
        request.kv_transfer_params,
        _salt_of(request),
        parent_id=_parent_of(request.request_id),
    )


def _parent_of(request_id: str) -> str:
    """Return the id of the request of which this is a sample, if it is: "2_parent"."""
    index, _, parent = request_id.partition("_")
    return parent if index.isdecimal() else ""


def _salt_of(request: Request) -> str:
    """Return a digest that no two requests have in common whose KV may differ.

    A client chooses some of what goes in, so each part says what it is and how long.
    """
    parts = [("salt", request.cache_salt)] if request.cache_salt else []
    if (lora := request.lora_request) is not None:
        parts += [("lora", lora.lora_name), ("path", lora.lora_path)]
    for feature in request.mm_features or ():
        place = feature.mm_position
        parts.append(("image", feature.identifier))
        parts.append(("place", f"{place.offset} {place.length}"))
    if not parts:
        return ""
    digest = hashlib.blake2b(digest_size=32)
    for label, value in parts:
        told = value.encode("utf-8", "surrogatepass")
        digest.update(f"{label} {len(told)} ".encode() + told)
    return digest.hexdigest()

"""The scheduler side of several connectors: loads from one, saves to all."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import anyio
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
    KVTransferResults,
    SupportsHMA,
    TakesHandshakes,
)
from asynckv.observability.lines import as_line

__all__ = ("MultiMetadata", "MultiScheduler")

logger = logging.getLogger(__name__)


class MultiMetadata(KVConnectorMetadata, frozen=True):
    """What each of them told its own workers, encoded."""

    parts: tuple[bytes, ...] = ()


class MultiScheduler(KVConnectorScheduler, AsksElsewhere, SupportsHMA, TakesHandshakes):
    """Asks its connectors in order, and loads from the first that has something.

    One that does not know yet is waited for: those behind it are asked later. All are
    told of every request, and save what they would save alone.
    """

    def __init__(self, children: Sequence[KVConnectorScheduler]) -> None:
        self.children = tuple(children)
        self._chosen: dict[str, int] = {}
        self._held: dict[str, set[int]] = {}

    def on_new_request(self, request: KVRequest) -> None:
        for child in self.children:
            child.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._chosen.pop(request.request_id, None)
        if request.request_id in self._held:
            return None, False  # an older request of that id is not quiet yet
        for index, child in enumerate(self.children):
            found = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if found[0] is None:
                return found
            if found[0]:
                self._chosen[request.request_id] = index
                return found
        return 0, False

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        chosen = self._chosen.get(request.request_id)
        for index, child in enumerate(self.children):
            count = num_external_tokens if index == chosen else 0
            child.update_state_after_alloc(request, block_ids, count)

    def build_connector_meta(self, step: KVConnectorStep) -> KVConnectorMetadata:
        told = [child.build_connector_meta(step) for child in self.children]
        return MultiMetadata(tuple(map(msgspec.msgpack.encode, told)))

    def update_connector_output(self, results: KVTransferResults) -> KVTransferResults:
        """As the contract says; each connector hears of its own transfers alone.

        :raises ValueError: the results do not say whose they are
        """
        believed = KVTransferResults()
        for index, child in enumerate(self.children):
            heard = child.update_connector_output(self._part_of(results, index))
            ended = frozenset(
                name
                for name in heard.finished_recving
                if self._lets_go(name, index) and name not in believed.finished_recving
            )
            believed |= KVTransferResults(
                finished_recving=ended,
                failed_recving=heard.failed_recving & ended,
                finished_sending=heard.finished_sending - believed.finished_sending,
                failed_sending=heard.failed_sending,
                full_sending=heard.full_sending,
                invalid_block_ids=heard.invalid_block_ids,
                reasons=heard.reasons,
            )
        return believed

    def request_finished(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        self._chosen.pop(request.request_id, None)
        held: set[int] = set()
        params: dict[str, object] = {}
        for index, child in enumerate(self.children):
            holds, carried = child.request_finished(request, block_ids)
            if holds:
                held.add(index)
            if twice := params.keys() & (carried or {}).keys():
                logger.warning("two connectors carry %s", as_line(", ".join(twice)))
            params = {**(carried or {}), **params}
        if held:
            self._held[request.request_id] = held
        return bool(held), params or None

    def request_finished_all_groups(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        return self.request_finished(request, block_ids)

    def has_pending_work(self) -> bool:
        return any(child.has_pending_work() for child in self.children)

    def reset_cache(self) -> bool | None:
        told = [child.reset_cache() for child in self.children]
        known = [one for one in told if one is not None]
        return all(known) if known else None

    def set_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshake]
    ) -> None:
        for child in self.children:
            if isinstance(child, TakesHandshakes):
                child.set_handshake_metadata(metadata)

    def statistics(self) -> tuple[object, ...]:
        return tuple(child.statistics() for child in self.children)

    def shutdown(self) -> None:
        for child in self.children:
            child.shutdown()

    async def start(self) -> None:
        for child in self._askers():
            await child.start()

    def take_questions(self) -> tuple[KVQuestion, ...]:
        """As the contract says; a question says whose it is by its number."""
        return tuple(
            msgspec.structs.replace(question, asker=index)
            for index, child in enumerate(self.children)
            if isinstance(child, AsksElsewhere)
            for question in child.take_questions()
        )

    async def ask(self, question: KVQuestion) -> KVAnswer:
        child = self.children[question.asker]
        if not isinstance(child, AsksElsewhere):
            raise ValueError(f"connector {question.asker} asks nothing")
        answer = await child.ask(msgspec.structs.replace(question, asker=0))
        return msgspec.structs.replace(answer, asker=question.asker)

    def take_answer(self, answer: KVAnswer) -> None:
        child = self.children[answer.asker]
        if isinstance(child, AsksElsewhere):
            child.take_answer(msgspec.structs.replace(answer, asker=0))

    async def aclose(self) -> None:
        try:
            with anyio.CancelScope(shield=True):
                for child in self._askers():
                    await child.aclose()
        finally:  # also if the task is cancelled: nothing stays open
            self.abort()

    def abort(self) -> None:
        for child in self._askers():
            child.abort()

    def _askers(self) -> list[AsksElsewhere]:
        return [child for child in self.children if isinstance(child, AsksElsewhere)]

    def _part_of(self, results: KVTransferResults, index: int) -> KVTransferResults:
        if results and len(results.parts) != len(self.children):
            raise ValueError(
                f"results of {len(results.parts)} connectors for {len(self.children)}: "
                "KVTransferResults.parts says whose they are, and has to be kept"
            )
        return results.parts[index] if results.parts else results

    def _lets_go(self, request_id: str, index: int) -> bool:
        """Whether that was the last connector that held an aborted request's blocks."""
        held = self._held.get(request_id)
        if held is None:
            return True
        held.discard(index)
        if held:
            return False
        del self._held[request_id]
        return True

"""Several connectors as one: loads from one of them, saves to all."""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import anyio
import msgspec
import torch

from asynckv.abc import (
    AsksElsewhere,
    BlockIds,
    KVAnswer,
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorStep,
    KVConnectorWorker,
    KVQuestion,
    KVRequest,
    KVTransferResults,
    SupportsHandshake,
    SupportsHMA,
    SupportsLayerwise,
    SupportsStreams,
    TakesHandshakes,
)
from asynckv.observability.lines import as_line
from asynckv.waits.waiting import wait_or_stop

__all__ = (
    "MultiMetadata",
    "MultiScheduler",
    "MultiWorker",
)


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


@runtime_checkable
class _BeginsToWait(Protocol):
    """A worker whose step may be over before anybody waits for its saves."""

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        """As ``wait_for_save``, of the step that is now, whenever it is awaited."""


class MultiWorker(
    KVConnectorWorker, SupportsHandshake, SupportsLayerwise, SupportsStreams
):
    """Does what each of its connectors does.

    What they finished comes out in ``parts``, each one's apart. In the whole a request
    is named once, and a save has failed where all that report it failed.
    """

    metadata_type = MultiMetadata

    def __init__(self, children: Sequence[KVConnectorWorker]) -> None:
        self.children = tuple(children)

    @property
    def wants_layers(self) -> bool:
        return any(
            isinstance(child, SupportsLayerwise) and child.wants_layers
            for child in self.children
        )

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Mapping[str, int] | None = None,
    ) -> None:
        for child in self.children:
            child.register_kv_caches(kv_caches, groups)

    def mark_stream(self) -> object:
        """One mark is for all of them: they have the same caches."""
        for child in self.children:
            if isinstance(child, SupportsStreams):
                return child.mark_stream()
        return None

    def follow(self, mark: object) -> None:
        for child in self.children:
            if isinstance(child, SupportsStreams):
                child.follow(mark)

    async def start(self) -> None:
        """As the contract says; if it fails or is cancelled, all of them are closed."""
        try:
            for child in self.children:
                await child.start()
        except BaseException:
            self.abort()
            raise

    def get_handshake_metadata(self) -> KVConnectorHandshake | None:
        """That of the first that has one which says something."""
        told = [
            child.get_handshake_metadata()
            for child in self.children
            if isinstance(child, SupportsHandshake)
        ]
        known = [one for one in told if one is not None]
        return max(known, key=lambda one: bool(one.incarnation), default=None)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        if not isinstance(metadata, MultiMetadata):
            raise TypeError(f"{type(metadata).__name__} is another connector's")
        for child, part in zip(self.children, metadata.parts, strict=True):
            child.bind_connector_metadata(
                msgspec.msgpack.decode(part, type=child.metadata_type)
            )

    def clear_connector_metadata(self) -> None:
        for child in self.children:
            child.clear_connector_metadata()

    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        for child in self.children:
            await child.start_load_kv(context, **kwargs)

    async def wait_for_layer_load(self, layer_name: str) -> None:
        for child in self.children:
            await child.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        for child in self.children:
            child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    async def wait_for_save(self) -> None:
        """As the contract says, of all together; an error waits for the others.

        All of them know of which step it is when this coroutine has begun.
        """
        waits = [_begun(child) for child in self.children]

        def stop() -> None:
            for wait in waits:
                wait.cancel()

        # Not gather's own cancellation: it would end those that have not begun.
        ended = asyncio.gather(*waits, return_exceptions=True)
        await wait_or_stop(ended, stop)
        errors = [error for error in ended.result() if error is not None]
        for error in errors[1:]:
            logger.error("the wait for saves failed in one more", exc_info=error)
        if errors:
            raise errors[0]

    def get_finished(
        self, finished_req_ids: frozenset[str] = frozenset()
    ) -> KVTransferResults:
        parts = tuple(child.get_finished(finished_req_ids) for child in self.children)
        if not any(parts):
            return KVTransferResults()
        whole = functools.reduce(operator.or_, parts)
        sent = [one.finished_sending - one.failed_sending for one in parts]
        failed = whole.failed_sending.difference(*sent)
        return msgspec.structs.replace(
            whole,
            failed_sending=failed,
            full_sending=whole.full_sending & failed,
            parts=parts,
        )

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        for child in self.children:
            child.call_when_finished(callback)

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        if isinstance(metadata, MultiMetadata):
            for child, part in zip(self.children, metadata.parts, strict=True):
                child.handle_preemptions(
                    msgspec.msgpack.decode(part, type=child.metadata_type)
                )

    def statistics(self) -> tuple[object, ...]:
        return tuple(child.statistics() for child in self.children)

    async def aclose(self) -> None:
        """As the contract says; a cancellation waits until all memory is quiet."""
        held_back: asyncio.CancelledError | None = None
        try:
            for child in self.children:
                try:
                    await child.aclose()
                except asyncio.CancelledError as exc:
                    held_back = exc
                    self.abort()
            if held_back is not None:
                raise held_back
        finally:
            held_back = None
            self.abort()

    def abort(self) -> None:
        for child in self.children:
            child.abort()


def _begun(child: KVConnectorWorker) -> asyncio.Future[None]:
    """Let its wait begin; if that fails, the wait does."""
    try:
        if isinstance(child, _BeginsToWait):
            return asyncio.ensure_future(child.begin_to_wait())
        return asyncio.ensure_future(child.wait_for_save())
    except Exception as exc:  # noqa: BLE001 - the wait raises it
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(exc)
        return failed

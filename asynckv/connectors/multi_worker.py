"""The worker side of several connectors."""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

from asynckv.abc import (
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorWorker,
    KVTransferResults,
    SupportsHandshake,
    SupportsLayerwise,
    SupportsStreams,
)
from asynckv.connectors.multi_scheduler import MultiMetadata
from asynckv.shielding import wait_or_stop

__all__ = ("MultiWorker",)

logger = logging.getLogger(__name__)


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

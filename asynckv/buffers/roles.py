"""One lookup buffer's face for a node: its role decides which verbs it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NoReturn

import torch

from asynckv.abc import (
    DropSelect,
    InsertWriter,
    KVLookupBuffer,
    KVLookupStatistics,
    KVSource,
    Match,
    SelectStream,
    TokenIds,
)
from asynckv.errors import WrongRole
from asynckv.tensors.blocks import KVMemory
from asynckv.types import TensorSpec

__all__ = ("LookupByRole",)


class LookupByRole(KVLookupBuffer):
    """Inserts into one buffer and selects from another; a role may lack either.

    ``empty``, ``insert``, ``open_insert``, ``taken`` and ``withdraw`` are the
    producer's, ``drop_select`` and ``open_drop_select`` the consumer's; without that
    role they raise :exc:`~asynckv.errors.WrongRole` when called. ``peek`` asks where
    ``drop_select`` would; a mere producer, its own buffer.
    """

    def __init__(
        self, inserts: KVLookupBuffer | None, selects: KVLookupBuffer | None
    ) -> None:
        self._inserts = inserts
        self._selects = selects

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._producer("empty").empty(shape, dtype)

    async def insert(
        self,
        input_tokens: TokenIds | None,
        roi: TokenIds | None,
        key: KVSource,
        value: KVSource,
        hidden: KVMemory | None,
        *,
        extras: Mapping[str, KVMemory] | None = None,
        entry_id: str | None = None,
        ttl_s: float | None = 600.0,
        deliveries: int = 1,
    ) -> str:
        return await self._producer("insert").insert(
            input_tokens,
            roi,
            key,
            value,
            hidden,
            extras=extras,
            entry_id=entry_id,
            ttl_s=ttl_s,
            deliveries=deliveries,
        )

    def drop_select(
        self,
        input_tokens: TokenIds | None = None,
        roi: TokenIds | None = None,
        *,
        entry_id: str | None = None,
        match: Match = "prefix",
        min_matched_tokens: int = 1,
        into: Mapping[str, KVMemory] | None = None,
    ) -> DropSelect:
        return self._consumer("drop_select").drop_select(
            input_tokens,
            roi,
            entry_id=entry_id,
            match=match,
            min_matched_tokens=min_matched_tokens,
            into=into,
        )

    async def peek(
        self, input_tokens: TokenIds | None = None, roi: TokenIds | None = None
    ) -> int:
        buffer = self._selects or self._producer("peek")
        return await buffer.peek(input_tokens, roi)

    async def taken(self, entry_id: str) -> None:
        await self._producer("taken").taken(entry_id)

    async def withdraw(self, entry_id: str) -> bool:
        return await self._producer("withdraw").withdraw(entry_id)

    def open_insert(
        self,
        input_tokens: TokenIds | None,
        roi: TokenIds | None,
        specs: Mapping[str, TensorSpec],
        *,
        entry_id: str | None = None,
        ttl_s: float | None = 600.0,
        deliveries: int = 1,
    ) -> AbstractAsyncContextManager[InsertWriter]:
        return self._producer("open_insert").open_insert(
            input_tokens,
            roi,
            specs,
            entry_id=entry_id,
            ttl_s=ttl_s,
            deliveries=deliveries,
        )

    def open_drop_select(
        self,
        input_tokens: TokenIds | None = None,
        roi: TokenIds | None = None,
        *,
        entry_id: str | None = None,
        match: Match = "prefix",
        min_matched_tokens: int = 1,
        into: Mapping[str, KVMemory] | None = None,
    ) -> AbstractAsyncContextManager[SelectStream]:
        return self._consumer("open_drop_select").open_drop_select(
            input_tokens,
            roi,
            entry_id=entry_id,
            match=match,
            min_matched_tokens=min_matched_tokens,
            into=into,
        )

    def statistics(self) -> KVLookupStatistics:
        """Those of the buffer that it inserts into, or else selects from."""
        return (self._inserts or self._consumer("statistics")).statistics()

    async def aclose(self) -> None:
        for buffer in (self._selects, self._inserts):
            if buffer is not None:
                await buffer.aclose()

    def abort(self) -> None:
        for buffer in (self._selects, self._inserts):
            if buffer is not None:
                buffer.abort()

    def _producer(self, verb: str) -> KVLookupBuffer:
        return self._inserts or _refuse(verb, "kv_producer")

    def _consumer(self, verb: str) -> KVLookupBuffer:
        return self._selects or _refuse(verb, "kv_consumer")


def _refuse(verb: str, role: str) -> NoReturn:
    raise WrongRole(f"{verb} is a {role}'s verb, and this node is none")

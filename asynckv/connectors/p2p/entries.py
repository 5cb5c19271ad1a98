"""One entry of a peer's prompt in a buffer: how it is opened, and how it is given up.

Whoever opens one reads its tensors as they land, where they lie on this GPU, or whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import msgspec
import torch

from asynckv.abc import KVEntry, KVLookupBuffer, SelectStream
from asynckv.buffers.local.writer import LocalViews
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.lookup import RemoteLookupBuffer
from asynckv.connectors.engine import HEADER, EntryHeader, prompt_digest
from asynckv.connectors.requests import LoadRequest
from asynckv.errors import IncompatiblePeer
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.views import spec_of
from asynckv.transfers.manifest import flatten
from asynckv.waits.waiting import clear_all_frames

__all__ = (
    "Source",
    "Target",
    "WholeEntry",
    "another_prompt",
    "are_views",
    "is_of",
    "open_entry",
    "release",
    "report_failure",
    "withdraw",
)

_REASON_LENGTH: Final = 300

Target: TypeAlias = "tuple[Callable[[], Awaitable[KVLookupBuffer]], str, int]"
"""Where an entry goes, once it is dialled, its id there, and how many read it."""


@contextlib.asynccontextmanager
async def open_entry(
    buffer: KVLookupBuffer, entry_id: str
) -> AsyncIterator[SelectStream]:
    """Select an entry as ``open_drop_select`` does; nobody may keep its tensors.

    In this process's own memory of a GPU they are views, as they land. In a peer's
    memory of this GPU it is waited for until it is whole, and they are views too: what
    streams there is copied.
    """
    async with _opened(buffer, entry_id) as stream:
        try:
            yield stream
        except BaseException as exc:
            if are_views(stream):
                clear_all_frames(exc)  # a view keeps the peer's memory in use
            raise


def are_views(stream: SelectStream) -> bool:
    """Are the tensors of a stream that was opened here views of a GPU's memory?"""
    return isinstance(stream, WholeEntry | LocalViews)


def _opened(
    buffer: KVLookupBuffer, entry_id: str
) -> contextlib.AbstractAsyncContextManager[SelectStream]:
    if isinstance(buffer, RemoteLookupBuffer) and buffer.reads_gpu_memory:
        return _whole(buffer, entry_id)
    if isinstance(buffer, LookupBuffer) and buffer.is_on_gpu:
        return buffer.open_views(entry_id)
    return buffer.open_drop_select(entry_id=entry_id)


@contextlib.asynccontextmanager
async def _whole(buffer: KVLookupBuffer, entry_id: str) -> AsyncIterator[SelectStream]:
    async with buffer.drop_select(entry_id=entry_id) as entry:
        whole = WholeEntry(entry)
        del entry  # its views are to end with this
        try:
            yield whole
        finally:
            whole.close()


class WholeEntry(SelectStream):
    """An entry that is here, as if its tensors landed one after the other."""

    def __init__(self, entry: KVEntry) -> None:
        self.entry_id = entry.entry_id
        self.attempt = entry.attempt
        self.matched_tokens = entry.matched_tokens
        self.input_tokens = entry.input_tokens
        self.roi = entry.roi
        named = flatten(entry.key, entry.value, entry.hidden, entry.extras)
        self._tensors = {
            name: tensor
            for name, tensor in named.items()
            if not isinstance(tensor, KVBlocks)  # which no entry holds
        }
        self.specs = {name: spec_of(tensor) for name, tensor in self._tensors.items()}
        self._left = list(self._tensors)

    async def __anext__(self) -> tuple[str, torch.Tensor]:
        if not self._left:
            raise StopAsyncIteration
        name = self._left.pop(0)
        return name, self._tensors[name]

    async def wait_for(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def close(self) -> None:
        """Nobody reads it any more. Never waits."""
        self._left.clear()
        self._tensors.clear()


Source: TypeAlias = "tuple[Callable[[], Awaitable[KVLookupBuffer]], str]"
"""Where an entry is, once it is dialled, and its id there."""


async def release(source: Source, request: LoadRequest, timeout_s: float) -> None:
    """Acknowledge an entry unread, once it is there: nobody needs it.

    A cancelled call has done so or not.

    :raises TimeoutError: it did not come
    :raises IncompatiblePeer: it is of another prompt, and was given back
    """
    find, entry_id = source
    async with asyncio.timeout(timeout_s):
        buffer = await find()
        async with open_entry(buffer, entry_id) as stream:
            if not is_of(stream, request):
                raise another_prompt(stream)


def is_of(stream: SelectStream, request: LoadRequest) -> bool:
    """Whether an entry's prompt begins as that of the request."""
    tokens, count = stream.input_tokens, request.num_tokens
    if tokens is None or len(tokens) < count:
        return False
    return prompt_digest(tokens[:count].tolist(), count) == request.digest


def another_prompt(stream: SelectStream) -> IncompatiblePeer:
    count = 0 if stream.input_tokens is None else len(stream.input_tokens)
    return IncompatiblePeer(
        f"the entry of {count} tokens is of another prompt", field="tokens"
    )


async def report_failure(
    target: Target,
    token_ids: Sequence[int],
    header: EntryHeader,
    reason: str,
    ttl_s: float,
) -> None:
    """Put an entry there that says why there is none, for who waits or will ask.

    A cancelled call has done so or not.

    :raises EntryConflict: there is one, for it was whole before the others failed
    :raises TimeoutError: there was no room in all the time that it would have stayed
    """
    find, entry_id, deliveries = target
    told = msgspec.structs.replace(
        header, layers=(), shape=None, failure=reason[:_REASON_LENGTH] or "it failed"
    )
    name = HEADER.removeprefix("extras.")
    async with asyncio.timeout(ttl_s):
        buffer = await find()
        await buffer.insert(
            torch.tensor(token_ids, dtype=torch.int64),
            *(None, None, None, None),
            extras={name: told.tensor()},
            entry_id=entry_id,
            ttl_s=ttl_s,
            deliveries=deliveries,
        )


async def withdraw(target: Target, timeout_s: float) -> None:
    """Remove an entry that nobody will ask for, if it is there.

    A cancelled call has done so or not.

    :raises TimeoutError: who holds it did not answer
    """
    find, entry_id, _ = target
    async with asyncio.timeout(timeout_s):
        buffer = await find()
        await buffer.withdraw(entry_id)

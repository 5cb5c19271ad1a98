"""A producer and a consumer that work until they are killed, and tell each step.

A report is one short write to a pipe: what was told before a kill has been told.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch

from asynckv.abc import KVEntry, KVLookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.errors import (
    BufferClosed,
    EntryAborted,
    EntryConflict,
    LeaseLost,
    PeerLost,
)
from asynckv.security.tls import TLS
from asynckv.tensors.views import spec_of
from harness.crashes.contents import is_right, named_tensors, tokens_of
from harness.crashes.orders import AWAITS, Order, Report, Word

__all__ = ("Worker",)

_MAX_WHY: Final = 300
_PLAIN_NBYTES: Final = 64 * 1024
"""Up to here a plain ``drop_select`` may deliver twice, above it may lose one."""


class Worker:
    """One producer or one consumer: does what ``order`` says.

    ``options`` are those of :func:`connect`; ``tls`` as a mapping of its fields."""

    def __init__(self, order: Order, options: dict[str, Any]) -> None:
        self._order = order
        self._options = dict(options)
        if "tls" in options:
            self._options["tls"] = TLS(**options["tls"])
        self._chance = random.Random(order.seed)
        self._encode: Callable[[Report], bytes] = msgspec.json.Encoder().encode

    async def work(self) -> None:
        """Connect, and work until this process is killed or the server leaves."""
        order = self._order
        async with self._connect(order.name) as peer:
            try:
                if order.role == "producer":
                    await self._produce_all(peer.lookup)
                else:
                    await self._consume_all(peer.lookup)
            except (PeerLost, BufferClosed) as exc:
                why = f"{type(exc).__name__}: {exc}"
                self._notify("left", why=why[:_MAX_WHY])

    async def _produce_all(self, lookup: KVLookupBuffer) -> None:
        for number in itertools.count(self._order.first):
            await self._produce(lookup, number)

    async def _consume_all(self, lookup: KVLookupBuffer) -> None:
        async with self._connect(self._order.name + AWAITS) as awaiting:
            while True:
                await self._consume(lookup, awaiting.lookup)

    def _connect(self, identity: str) -> Peer:
        return connect(self._order.url, identity=identity, **self._options)

    def _notify(
        self, word: Word, entry_id: str = "", number: int = 0, *, why: str = ""
    ) -> None:
        line = self._encode(Report(os.getpid(), word, entry_id, number, why))
        os.write(1, line + b"\n")  # whole, as every write of a pipe's atomic size

    async def _produce(self, lookup: KVLookupBuffer, number: int) -> None:
        entry_id = f"{self._order.name}-{number}"
        tensors, tokens = named_tensors(entry_id), tokens_of(entry_id)
        self._notify("begun", entry_id, number)
        if number % 3:
            key = {name.removesuffix(".key"): t for name, t in tensors.items()}
            await lookup.insert(tokens, None, key, None, None, entry_id=entry_id)
        else:
            specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
            writing = lookup.open_insert(tokens, None, specs, entry_id=entry_id)
            # Killed after the commit, its next incarnation finds the id in use.
            with contextlib.suppress(EntryConflict):
                async with writing as writer:
                    for name, tensor in tensors.items():
                        await writer.put(name, tensor)
        self._notify("in", entry_id, number)

    async def _consume(self, lookup: KVLookupBuffer, awaiting: KVLookupBuffer) -> None:
        way = self._chance.choice((self._take, self._use, self._use, self._stream))
        try:
            await way(awaiting if way == self._take else lookup)
        except EntryAborted:
            self._notify("late")
        except LeaseLost:
            self._notify("late")

    async def _take(self, lookup: KVLookupBuffer) -> None:
        self._notify("wait", number=1)
        entry = await lookup.drop_select()
        self._check(entry.entry_id, entry, entry.attempt)
        self._notify("done", entry.entry_id, int(entry.nbytes <= _PLAIN_NBYTES))

    async def _use(self, lookup: KVLookupBuffer) -> None:
        self._notify("wait")
        async with lookup.drop_select() as entry:
            self._check(entry.entry_id, entry, entry.attempt)
            await self._leave(entry.entry_id)
        self._notify("done", entry.entry_id)

    async def _stream(self, lookup: KVLookupBuffer) -> None:
        self._notify("wait")
        async with lookup.open_drop_select() as stream:
            tensors = {name: tensor async for name, tensor in stream}
            self._check(stream.entry_id, tensors, stream.attempt)
            await self._leave(stream.entry_id)
        self._notify("done", stream.entry_id)

    async def _leave(self, entry_id: str) -> None:
        """Use what it has for a moment, in which it may be killed; then tell."""
        await asyncio.sleep(self._order.longest_use_s * self._chance.random())
        self._notify("leaving", entry_id)

    def _check(
        self, entry_id: str, found: KVEntry | dict[str, torch.Tensor], attempt: int
    ) -> None:
        self._notify("got" if is_right(entry_id, found) else "wrong", entry_id, attempt)

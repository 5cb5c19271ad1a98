"""A producer and a consumer that work until they are killed, and tell each step.

A report is one short write to a pipe: what was told before a kill has been told. What
an entry holds follows from its id: whoever gets it can tell every byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

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

__all__ = (
    "AWAITS",
    "Order",
    "Report",
    "Role",
    "Word",
    "Worker",
    "is_right",
    "named_tensors",
    "tokens_of",
)


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


AWAITS: Final = ".awaits"
"""A consumer's plain awaits are made under its name and this."""

Role = Literal["producer", "consumer"]

Word = Literal[
    "pid",  # the child was forked
    "gone",  # a child has ended (number: its wait status)
    "begun",  # a producer begins to insert this entry
    "in",  # ... its insert has returned
    "wait",  # a consumer begins to select (number: 1 if a kill now may lose one)
    "got",  # ... it has this entry, verified (number: attempt)
    "leaving",  # ... and is about to leave its body, which acknowledges it
    "done",  # ... and its use was acknowledged
    "late",  # ... but the entry had been taken back before
    "wrong",  # ... but its bytes are not those of the entry
    "left",  # the server has gone, as far as it can tell (why)
]


class Order(msgspec.Struct, frozen=True):
    """Fork a child that does this until it is killed."""

    role: Role
    name: str
    url: str
    seed: int
    first: int = 0
    longest_use_s: float = 0.004
    """A consumer uses an entry for so long at most before it leaves its body."""
    options: dict[str, Any] = {}


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened in process ``pid``."""

    pid: int
    word: Word
    entry_id: str = ""
    number: int = 0
    why: str = ""


_NUMELS: Final = (1, 8, 1_000, 5_000, 20_000, 100_000)
_LAYERS: Final = 3


def tokens_of(entry_id: str) -> list[int]:
    """Return the tokens of an entry: few, and shared by many."""
    seed = zlib.crc32(entry_id.encode())
    return [seed % 3, seed % 7, seed % 64, seed]


def named_tensors(entry_id: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an entry by name: 24 bytes to 2.4 MB of int64."""
    seed = zlib.crc32(entry_id.encode())
    numel = _NUMELS[seed % len(_NUMELS)]
    return {
        f"{layer}.key": torch.arange(numel, dtype=torch.int64) * (layer + 1) + seed
        for layer in range(_LAYERS)
    }


def is_right(entry_id: str, found: KVEntry | Mapping[str, torch.Tensor]) -> bool:
    """Whether ``found`` holds exactly the bytes of entry ``entry_id``."""
    if isinstance(found, KVEntry):
        if found.input_tokens is None or not isinstance(found.key, Mapping):
            return False
        if found.input_tokens.tolist() != tokens_of(entry_id):
            return False
        found = {f"{layer}.key": tensor for layer, tensor in found.key.items()}
    wanted = named_tensors(entry_id)
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in wanted.items()
    )

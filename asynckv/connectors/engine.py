"""What a connector has to know of the engine that calls it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy
import torch

from asynckv.errors import EntryAborted, IncompatiblePeer
from asynckv.observability.lines import as_line
from asynckv.parallel.plans import RankRead, plan_reshard, readers_of
from asynckv.parallel.shapes import EngineShape, Rank, split_layers
from asynckv.transfers.tokens import as_text
from asynckv.types import KVFingerprint, TensorSpec, as_count, as_flag

__all__ = (
    "HEADER",
    "SHAPE_KEY",
    "EntryHeader",
    "KVEngine",
    "NotSaved",
    "PrefixKeys",
    "StoredShape",
    "keys_of_ranks",
    "namespace_of",
    "prefix_block_keys",
    "prompt_digest",
    "rank_block_keys",
    "salt_digest",
)


class KVEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as one of its processes sees it.

    ``engine_id`` is what its peers call it. ``block_size`` is tokens a block. ``rank``
    is this worker's, counted over all stages; a scheduler side is of no rank and leaves
    it. ``shape`` says how caches lie in memory; without it nothing is known of that,
    and whole blocks move between engines of as many ranks. ``block_nbytes`` is how much
    of one rank's memory a block takes in all layers, if that is known.
    ``holds_saved_blocks``: it leaves the blocks of a save alone until it is told that
    the save has ended, as vLLM does; where it cannot, it says so by
    :meth:`~asynckv.abc.SupportsHeldBlocks.let_go_of_blocks`.

    :raises ValueError: there is no such rank, or the shape is another engine's
    :raises TypeError: a field is of another type
    """

    engine_id: str
    block_size: int
    rank: int = 0
    tp_size: int = 1
    shape: EngineShape | None = None
    block_nbytes: int | None = None
    holds_saved_blocks: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("tp_size", 1), ("rank", 0)):
            count = as_count(getattr(self, name), name, least=least)
            msgspec.structs.force_setattr(self, name, count)
        if self.block_nbytes is not None:
            as_count(self.block_nbytes, "block_nbytes")
        as_flag(self.holds_saved_blocks, "holds_saved_blocks")
        as_text(self.engine_id, "engine_id")
        if not isinstance(self.shape, EngineShape | None):
            raise TypeError(f"shape is an EngineShape, not {self.shape!r:.40}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")
        shape = self.shape
        if shape and (shape.tp_size, shape.block_size) != (
            self.tp_size,
            self.block_size,
        ):
            raise ValueError(
                f"the shape is of tp_size={shape.tp_size}, block_size="
                f"{shape.block_size}, the engine of {self.tp_size}, {self.block_size}"
            )

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self.tp_size * (self.shape.pp_size if self.shape else 1)

    @property
    def place(self) -> Rank:
        """The worker's stage, and its rank within that."""
        return Rank(*divmod(self.rank, self.tp_size))

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens take."""
        return -(-num_tokens // self.block_size)

    def shape_over(
        self, ranks: int = 0, tp_size: int = 0, pp_size: int = 0
    ) -> EngineShape | None:
        """Return this engine's shape if it had so many ranks, as far as is known.

        ``ranks`` are those of all stages. What is not said (0) is as here, or follows
        from the others; the layers are divided over other stages as vLLM does.

        :raises ValueError: there is no such engine
        """
        ours = self.shape
        if ours is None:
            return None
        if ranks:
            pp_size = pp_size or (ranks // tp_size if tp_size else ours.pp_size)
            tp_size = tp_size or ranks // pp_size
            if tp_size * pp_size != ranks:
                raise ValueError(
                    f"{ranks} ranks are not {pp_size} stages of {tp_size} ranks each"
                )
        tp_size, pp_size = tp_size or ours.tp_size, pp_size or ours.pp_size
        stages = ours.stages
        if pp_size != ours.pp_size:
            stages = split_layers(ours.num_layers, pp_size)
        return msgspec.structs.replace(ours, tp_size=tp_size, stages=stages)

    def reads_from(self, source: EngineShape | None) -> dict[int, RankRead | None]:
        """Return which ranks of another engine this one reads from, and what.

        :raises IncompatiblePeer: it has another model, or only one of the two is known
        """
        if self.shape is None and source is None:
            return {self.rank: None}
        if self.shape is None or source is None:
            raise _one_is_unknown(self.shape is None)
        plan = plan_reshard(source, self.shape, self.place)
        return {
            read.source.pp * source.tp_size + read.source.tp: read
            for read in plan.reads
        }

    def readers_in(self, target: EngineShape | None) -> tuple[int, ...]:
        """Return which ranks of another engine read from this one.

        :raises IncompatiblePeer: as :meth:`reads_from`
        """
        if self.shape is None and target is None:
            return (self.rank,)
        if self.shape is None or target is None:
            raise _one_is_unknown(self.shape is None)
        readers = readers_of(self.shape, target, self.place)
        return tuple(rank.pp * target.tp_size + rank.tp for rank in readers)

    def layers_of(
        self, read: RankRead | None, layers: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return which of this rank's ``layers`` are in one of its reads."""
        if read is None or read.plan.target.layout.is_across_layers:
            return layers
        first = read.plan.target.layers_of(read.plan.rank.pp)[0]
        return tuple(layers[layer - first] for layer in read.layers)


def _one_is_unknown(is_ours: bool) -> IncompatiblePeer:
    here, there = ("unknown", "known") if is_ours else ("known", "unknown")
    return IncompatiblePeer(
        f"how caches lie in memory is {here} here and {there} there",
        field="layout",
        hint="whole blocks move between two engines whose layout is not known",
    )


_DIGEST_NBYTES: Final = 32


def prompt_digest(token_ids: Sequence[int], num_tokens: int) -> bytes:
    """Return the digest of the first ``num_tokens`` ids."""
    return _digest(_bytes_of(token_ids[:num_tokens]))


def salt_digest(salt: str) -> bytes:
    """Return the digest of what decides on KV beside tokens; of nothing, nothing."""
    return _digest(salt.encode("utf-8", "surrogatepass")) if salt else b""


class PrefixKeys:
    """Makes the keys of prompts' blocks for one model, as :func:`prefix_block_keys`.

    :raises ValueError: ``block_size`` is no number of tokens
    """

    def __init__(self, block_size: int, fingerprint: KVFingerprint | None) -> None:
        self._block_size = as_count(block_size, "block_size")
        self._fingerprint = fingerprint
        self._unsalted = self._root("")

    def of(self, token_ids: Sequence[int], salt: str = "") -> tuple[str, ...]:
        """Return a key for each whole block.

        :raises ValueError: an id is no whole number
        """
        ids, nbytes = _bytes_of(token_ids), 8 * self._block_size
        parent = self._root(salt) if salt else self._unsalted
        keys = []
        for end in range(nbytes, len(ids) + 1, nbytes):
            block = parent + ids[end - nbytes : end]
            parent = hashlib.blake2b(block, digest_size=_DIGEST_NBYTES).digest()
            keys.append(parent.hex())
        return tuple(keys)

    def _root(self, salt: str) -> bytes:
        # Of a request, so perhaps no text that could be encoded.
        told = salt.encode("utf-8", "surrogatepass")
        named = (self._block_size, self._fingerprint, told)
        return _digest(b"asynckv/1" + msgspec.msgpack.encode(named))


def prefix_block_keys(
    token_ids: Sequence[int],
    block_size: int,
    fingerprint: KVFingerprint | Mapping[str, str] | str | None = None,
    salt: str = "",
) -> tuple[str, ...]:
    """Return a key for each whole block of a prompt, for a store of KV blocks.

    A block's key stands for all tokens up to its end, so two prompts have as many keys
    in common as whole blocks. Another model or ``salt`` (a tenant's, say) has other
    keys, whatever the tokens.

    :raises ValueError: ``block_size`` is no number of tokens, an id no whole number, or
        these are several prompts
    :raises TypeError: ``fingerprint`` or ``salt`` is no such thing
    """
    if not isinstance(salt, str):
        raise TypeError(f"salt is a str, not {salt!r:.40}")
    return PrefixKeys(block_size, KVFingerprint.of(fingerprint)).of(token_ids, salt)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_NBYTES).digest()


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    # As an engine has them, for which numpy takes five times as long.
    if isinstance(token_ids, (list, tuple)) and token_ids and type(token_ids[0]) is int:
        try:
            return struct.pack(f"<{len(token_ids)}q", *token_ids)
        except struct.error:
            pass  # not all of them are such numbers: numpy says so
    ids = numpy.asarray(token_ids)
    # Cut to whole numbers, other tokens would have the same key. (None are floats.)
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"token ids are whole numbers, not {ids.dtype}")
    if ids.ndim > 1 and ids.size != ids.shape[-1]:
        raise ValueError(f"shape {ids.shape} is no prompt's: pass ids of one sequence")
    return ids.astype("<i8").tobytes()


def rank_block_keys(block_keys: Sequence[str], namespace: str, rank: int) -> list[str]:
    """Return the keys of one rank's part of blocks, in engines of a ``namespace``."""
    return [f"{key}/{namespace}/{rank}" for key in block_keys]


_KEYS_A_TURN: Final = 256


async def keys_of_ranks(
    block_keys: Sequence[str], namespace: str, ranks: range
) -> list[str]:
    """Return those of several ranks, block by block: of thousands, in several turns.

    A cancelled call leaves no trace.
    """
    keys: list[str] = []
    for start in range(0, len(block_keys), _KEYS_A_TURN):
        if start:
            await asyncio.sleep(0)  # others have their turn
        some = block_keys[start : start + _KEYS_A_TURN]
        of_ranks = [rank_block_keys(some, namespace, rank) for rank in ranks]
        keys += itertools.chain.from_iterable(zip(*of_ranks, strict=True))
    return keys


HEADER: Final = "extras.asynckv"
"""The name of that tensor."""

_MAX_NBYTES: Final = 2**20


class NotSaved(EntryAborted):
    """The engine that computed it could not save it, and says why."""


class EntryHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Whose blocks they are, and the names of the layers in the order of the model.

    ``salt`` is the digest of what decides on the KV beside the tokens. An entry with a
    ``failure`` holds nothing else: it stands for one that could not be saved.
    """

    engine_id: str
    rank: int
    block_size: int
    layers: tuple[str, ...]
    shape: EngineShape | None = None
    salt: bytes = b""
    failure: str = ""
    version: int = 1

    def check_saved(self) -> None:
        """Tell a whole entry from one that only says why there is none.

        :raises NotSaved: it is the latter
        """
        if self.failure:
            who = as_line(f"{self.engine_id}/{self.rank}")
            raise NotSaved(f"{who} has not saved it: {as_line(self.failure)}")

    def tensor(self) -> torch.Tensor:
        """Return it as a tensor of bytes."""
        return torch.frombuffer(
            bytearray(msgspec.msgpack.encode(self)), dtype=torch.uint8
        )

    @classmethod
    def of(cls, tensor: torch.Tensor) -> EntryHeader:
        """Read it.

        :raises IncompatiblePeer: it is none, or of another version
        """
        try:
            header = msgspec.msgpack.decode(tensor.numpy().tobytes(), type=cls)
        except (msgspec.MsgspecError, ValueError, TypeError) as exc:
            raise IncompatiblePeer(
                f"the entry does not say whose it is: {exc}", field="header"
            ) from exc
        if header.version != 1:
            raise IncompatiblePeer(
                f"the entry is of version {header.version}", field="version"
            )
        return header

    @staticmethod
    def check_spec(spec: TensorSpec | None) -> None:
        """Refuse an entry without header, before any byte of it is looked at.

        :raises IncompatiblePeer: it was not inserted by a connector
        """
        if spec is None or spec.dtype != "uint8" or spec.nbytes > _MAX_NBYTES:
            raise IncompatiblePeer(
                "the entry was not inserted by a connector", field="header"
            )


SHAPE_KEY: Final = "asynckv/shape"
"""Where those who save say how their blocks are cut."""

_MAX_SHAPE_NBYTES: Final = 64 * 1024


class StoredShape(msgspec.Struct, frozen=True, kw_only=True):
    """How the KV of an engine is cut into values, as it says itself."""

    tp_size: int
    size: int
    block_size: int
    chunk_tokens: int = 0
    shape: EngineShape | None = None

    @classmethod
    def of(cls, engine: KVEngine, chunk_tokens: int) -> StoredShape:
        """Return what an engine says whose values are of so many tokens."""
        return cls(
            tp_size=engine.tp_size,
            size=engine.size,
            block_size=engine.block_size,
            chunk_tokens=chunk_tokens,
            shape=engine.shape,
        )

    @classmethod
    def read(cls, value: torch.Tensor | None) -> StoredShape | None:
        """Return what a store says; ``None`` if that is nothing of the kind."""
        if (
            value is None
            or value.dtype != torch.uint8
            or value.nbytes > _MAX_SHAPE_NBYTES
        ):
            return None
        try:
            return msgspec.msgpack.decode(value.numpy().tobytes(), type=cls)
        except (msgspec.MsgspecError, ValueError, TypeError):
            return None

    def tensor(self) -> torch.Tensor:
        """Return it as a value of a store."""
        return torch.frombuffer(
            bytearray(msgspec.msgpack.encode(self)), dtype=torch.uint8
        )

    def differs_from(self, ours: StoredShape) -> str:
        """Say in what; nothing if its blocks can be loaded by who says ``ours``."""
        if self == ours:
            return ""
        # Engines from before there were chunks say 0.
        there = msgspec.structs.asdict(self)
        there["chunk_tokens"] = self.chunk_tokens or "one block"
        named = [
            f"{name}={there[name]} there and {getattr(ours, name)} here"
            for name in ("tp_size", "block_size", "chunk_tokens")
            if getattr(self, name) != getattr(ours, name)
        ]
        return ", ".join(named) or "heads, layers or layout are others"


def namespace_of(engine: KVEngine) -> str:
    """Return what is equal for engines whose ranks can read each other's blocks."""
    told = msgspec.msgpack.encode(
        (engine.size, engine.tp_size, engine.block_size, engine.shape)
    )
    return hashlib.blake2b(told, digest_size=8).hexdigest()

"""Whose blocks a store holds: engines that are cut otherwise hear that they are."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec
import torch

from asynckv.connectors.engine import KVEngine
from asynckv.parallel.shapes import EngineShape

__all__ = ("SHAPE_KEY", "StoredShape", "namespace_of")

SHAPE_KEY: Final = "asynckv/shape"
"""Where those who save say how their blocks are cut."""

_MAX_NBYTES: Final = 64 * 1024


class StoredShape(msgspec.Struct, frozen=True, kw_only=True):
    """How the blocks of an engine are cut, as it says itself."""

    tp_size: int
    size: int
    block_size: int
    shape: EngineShape | None = None

    @classmethod
    def of(cls, engine: KVEngine) -> StoredShape:
        """Return what an engine says."""
        return cls(
            tp_size=engine.tp_size,
            size=engine.size,
            block_size=engine.block_size,
            shape=engine.shape,
        )

    @classmethod
    def read(cls, value: torch.Tensor | None) -> StoredShape | None:
        """Return what a store says; ``None`` if that is nothing of the kind."""
        if value is None or value.dtype != torch.uint8 or value.nbytes > _MAX_NBYTES:
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

    def differs_from(self, engine: KVEngine) -> str:
        """Say in what; nothing if its blocks can be loaded by ``engine``."""
        ours = StoredShape.of(engine)
        if self == ours:
            return ""
        named = [
            f"{name}={getattr(self, name)} there and {getattr(ours, name)} here"
            for name in ("tp_size", "block_size")
            if getattr(self, name) != getattr(ours, name)
        ]
        return ", ".join(named) or "heads, layers or layout are others"


def namespace_of(engine: KVEngine) -> str:
    """Return what is equal for engines whose ranks can read each other's blocks."""
    told = msgspec.msgpack.encode((engine.size, engine.tp_size, engine.shape))
    return hashlib.blake2b(told, digest_size=8).hexdigest()

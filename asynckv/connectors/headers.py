"""What an entry says of the engine that computed it: its first tensor."""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from asynckv.errors import EntryAborted, IncompatiblePeer
from asynckv.observability.lines import as_line
from asynckv.parallel.shapes import EngineShape
from asynckv.types import TensorSpec

__all__ = ("HEADER", "EntryHeader", "NotSaved")

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

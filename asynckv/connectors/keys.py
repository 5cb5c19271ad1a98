"""What identifies a prompt, or a part of it, and the engine that computed its KV.

Digests that nobody can make collide. An entry's first tensor says of which engine it
is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy
import torch

from asynckv.errors import EntryAborted, IncompatiblePeer
from asynckv.observability.lines import as_line
from asynckv.parallel.shapes import EngineShape
from asynckv.types import KVFingerprint, TensorSpec

__all__ = (
    "HEADER",
    "EntryHeader",
    "NotSaved",
    "prefix_block_keys",
    "prompt_digest",
    "rank_block_keys",
    "salt_digest",
)


_DIGEST_NBYTES: Final = 32


def prompt_digest(token_ids: Sequence[int], num_tokens: int) -> bytes:
    """Return the digest of the first ``num_tokens`` ids."""
    return _digest(_bytes_of(token_ids[:num_tokens]))


def salt_digest(salt: str) -> bytes:
    """Return the digest of what decides on KV beside tokens; of nothing, nothing."""
    return _digest(salt.encode("utf-8", "surrogatepass")) if salt else b""


def prefix_block_keys(
    token_ids: Sequence[int],
    block_size: int,
    fingerprint: KVFingerprint | None = None,
    salt: str = "",
) -> tuple[str, ...]:
    """Return a key for each whole block of a prompt, for a store of KV blocks.

    A block's key stands for all tokens up to its end, so two prompts have as many keys
    in common as whole blocks. Another model or ``salt`` (a tenant's, say) has other
    keys, whatever the tokens.

    :raises ValueError: ``block_size`` is no number of tokens, or an id no whole number
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}")
    ids = _bytes_of(token_ids)
    # Of a request, so perhaps no text that could be encoded.
    named = (block_size, fingerprint, salt.encode("utf-8", "surrogatepass"))
    parent = _digest(b"asynckv/1" + msgspec.msgpack.encode(named))
    keys = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        block = ids[(end - block_size) * 8 : end * 8]
        parent = _digest(parent + block)
        keys.append(parent.hex())
    return tuple(keys)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_NBYTES).digest()


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    ids = numpy.asarray(token_ids)
    # Cut to whole numbers, other tokens would have the same key. (None are floats.)
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"token ids are whole numbers, not {ids.dtype}")
    return ids.astype("<i8").tobytes()


def rank_block_keys(block_keys: Sequence[str], namespace: str, rank: int) -> list[str]:
    """Return the keys of one rank's part of blocks, in engines of a ``namespace``."""
    return [f"{key}/{namespace}/{rank}" for key in block_keys]


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

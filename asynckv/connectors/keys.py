"""What identifies a prompt, or a part of one: digests that nobody can make collide."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy

from asynckv.types import KVFingerprint

__all__ = ("prefix_block_keys", "prompt_digest", "rank_block_keys", "salt_digest")

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

"""A model whose KV depends on every token before, and whose tokens on all of its KV.

One wrong byte anywhere in a cache gives another next token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy
import numpy.typing

__all__ = ("Rows", "ToyModel", "mix")

_VOCABULARY: Final = 50_000
Rows = numpy.typing.NDArray[numpy.int32]


def mix(
    words: numpy.typing.NDArray[numpy.uint64],
) -> numpy.typing.NDArray[numpy.uint64]:
    """Return words that have nothing visible in common with those given."""
    with numpy.errstate(over="ignore"):
        words = (words ^ (words >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return words ^ (words >> numpy.uint64(31))


class ToyModel:
    """So many layers and heads of int32, computed from nothing but token ids."""

    def __init__(self, layers: int = 4, heads: int = 4, head_dim: int = 8) -> None:
        self.layers, self.heads, self.head_dim = layers, heads, head_dim

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers in order."""
        return tuple(f"model.layers.{i}.attn" for i in range(self.layers))

    def rows(self, token_ids: Sequence[int], start: int, layer: int) -> Rows:
        """Return the KV of tokens from ``start`` on: (tokens, 2, heads, head_dim)."""
        states = numpy.array(list(self._states(token_ids))[start:], dtype=numpy.uint64)
        count = 2 * self.heads * self.head_dim
        places = numpy.arange(count, dtype=numpy.uint64) + numpy.uint64(layer * count)
        words = mix(states[:, None] ^ mix(places + numpy.uint64(1))[None, :])
        rows = words.astype(numpy.uint32).view(numpy.int32)
        return rows.reshape(len(states), 2, self.heads, self.head_dim)

    def next_token(self, sums: Sequence[int]) -> int:
        """Return the token that follows, given every head of each layer summed up."""
        word = numpy.array([sum(sums) % 2**64], dtype=numpy.uint64)
        return int(mix(word)[0] % numpy.uint64(_VOCABULARY))

    def sum_of(self, rows: Rows, layer: int, head: int) -> int:
        """Return what the KV of one head of one layer, (tokens, 2, dim), comes to."""
        flat = numpy.ascontiguousarray(rows).view(numpy.uint32).astype(numpy.uint64)
        seed = numpy.uint64((layer * self.heads + head) << 32)
        places = numpy.arange(flat.size, dtype=numpy.uint64) + seed
        with numpy.errstate(over="ignore"):
            return int(mix(flat.ravel() ^ mix(places)).sum())

    def generate(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return what an engine must generate, without one."""
        tokens = list(token_ids)
        for _ in range(count):
            kv = [self.rows(tokens, 0, layer) for layer in range(self.layers)]
            sums = [
                self.sum_of(kv[layer][:, :, head], layer, head)
                for layer in range(self.layers)
                for head in range(self.heads)
            ]
            tokens.append(self.next_token(sums))
        return tokens[len(token_ids) :]

    def _states(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Yield for each token what stands for it and all before it."""
        state = 0x9E3779B97F4A7C15
        for token in token_ids:
            state = (state ^ (token + 1)) * 0xD6E8FEB86659FD93 % 2**64
            state ^= state >> 32
            yield state

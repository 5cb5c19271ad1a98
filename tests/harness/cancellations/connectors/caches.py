"""Caches of one rank with one prompt: computed, overwritten, and looked at."""

from __future__ import annotations

from typing import Final

import torch

from asynckv.parallel.shapes import EngineShape
from asynckv.testing.expectations import expect
from harness.engines.toy_model import ToyModel
from harness.engines.toy_rank import ToyRank
from harness.fake_devices import FakeDevice

__all__ = ("ToyCaches",)

_BLOCKS: Final = 8
_SPOILT: Final = 0x5A5A5A5A
_PLACES: Final = ((5, 2, 7), (1, 6, 3))


class ToyCaches:
    """The toy engine's, of so few blocks that all of it is looked at each time.

    The prompt is always the same. ``place`` says in which blocks it is.
    """

    def __init__(
        self,
        model: ToyModel,
        shape: EngineShape,
        rank: int,
        place: int,
        gpu: FakeDevice | None = None,
    ) -> None:
        self.block_ids = _PLACES[place]
        self.tokens = tuple(range(1000, 1000 + len(self.block_ids) * shape.block_size))
        self._rank = ToyRank(model, shape, rank, _BLOCKS, gpu)
        self.layers = self._rank.caches
        for layer in self.layers:
            self._rank.write(layer, self.block_ids, self.tokens, 0)
        self._expected = {layer: self._read(layer) for layer in self.layers}
        self._computed = {layer: each.cpu() for layer, each in self.layers.items()}
        if gpu is None:
            self._computed = {layer: one.clone() for layer, one in self.layers.items()}
        self.spoil()

    @property
    def prompt_nbytes(self) -> int:
        """How much the prompt's blocks are, in all layers."""
        whole = sum(cache.nbytes for cache in self.layers.values())
        return whole * len(self.block_ids) // _BLOCKS

    def compute(self) -> None:
        """The prompt's KV is in its blocks."""
        for layer, cache in self.layers.items():
            cache.copy_(self._computed[layer])

    def spoil(self) -> None:
        """Its blocks are somebody else's now, as are all others."""
        for cache in self.layers.values():
            cache.fill_(_SPOILT)

    def expect_computed(self) -> None:
        """:raises AssertionError: a byte of the prompt's KV is not what it should be"""
        for layer, expected in self._expected.items():
            expect(torch.equal(self._read(layer), expected), f"{layer} is wrong")

    def expect_spoilt(self) -> None:
        """:raises AssertionError: somebody wrote here after they were done"""
        for layer, cache in self.layers.items():
            expect(bool((cache == _SPOILT).all()), f"{layer} was written to")

    def _read(self, layer: str) -> torch.Tensor:
        return self._rank.read(layer, self.block_ids, len(self.tokens)).clone()

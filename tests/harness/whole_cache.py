"""A whole model's KV, cut into what each rank of an engine would hold: the slow way.

What plans are judged by, so nothing here knows of strides: it slices, transposes and
stacks. Each byte of the model is a number of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy
import numpy.typing

from asynckv.parallel.shapes import CROSS_LAYER_LAYOUTS, EngineShape, KVLayout, Rank

__all__ = (
    "BLOCK_SIZES",
    "HEADS",
    "LAYOUTS",
    "NOTHING",
    "TP_SIZES",
    "Numbers",
    "WholeCache",
)

Numbers: TypeAlias = numpy.typing.NDArray[numpy.int64]

NOTHING: Final = -1
"""Stands in padding, and in blocks beyond the last token."""

# What engines differ in, so what plans are made between.
TP_SIZES: Final = (1, 2, 3, 4, 6, 8, 16)
HEADS: Final = (1, 2, 4, 8, 12, 16, 32)
BLOCK_SIZES: Final = (16, 32, 64, 128)
LAYOUTS: Final = (
    KVLayout.kv_first("NHD"),
    KVLayout.kv_first("HND"),
    KVLayout.blocks_first("NHD"),
    KVLayout.blocks_first("HND"),
    KVLayout.fused("NHD"),
    KVLayout.fused("HND"),
    KVLayout.pallas(row_align_nbytes=4),
    *(KVLayout.named(name) for name in CROSS_LAYER_LAYOUTS),
)


@dataclasses.dataclass(frozen=True)
class WholeCache:
    """The KV of ``tokens`` tokens of the model that ``shape`` is one cut of.

    Tokens before ``first`` are not there.
    """

    shape: EngineShape
    tokens: int
    first: int = 0

    def regions(self, shape: EngineShape, rank: Rank) -> list[Numbers]:
        """Return what a rank holds: ``(blocks, bytes of a block)`` for each region.

        ``shape`` is any cut of the same model.
        """
        parts = []
        for part in range(len(shape.part_nbytes)):
            blocks, dims = self._blocks(part, shape, rank), "LBNHC"
            if shape.is_mla:
                blocks, dims = blocks[:, :, :, 0], "LBNC"
            order = shape.layout.axes.replace("K", "") + "C"
            parts.append(blocks.transpose([dims.index(axis) for axis in order]))
        return _regions(shape.layout.axes, parts)

    def _blocks(self, part: int, shape: EngineShape, rank: Rank) -> Numbers:
        """Return a rank's keys, or values: layers, blocks, tokens, heads, bytes."""
        layers, heads = shape.layers_of(rank.pp), shape.heads_of(rank.tp)
        mine = self._model(part)[
            layers.start : layers.stop, :, heads.start : heads.stop
        ]
        content = mine.shape[-1]
        count = -(-self.tokens // shape.block_size)
        padded = numpy.full(
            (
                len(layers),
                count * shape.block_size,
                len(heads),
                shape.layout.row_nbytes(content),
            ),
            NOTHING,
        )
        padded[:, : self.tokens, :, :content] = mine
        return padded.reshape(len(layers), count, shape.block_size, *padded.shape[2:])

    def _model(self, part: int) -> Numbers:
        """Return all keys, or all values, as layers, tokens, heads, bytes."""
        dims = self.shape.num_layers, self.tokens, self.shape.num_kv_heads
        sizes = [
            nbytes * dims[0] * dims[1] * dims[2] for nbytes in self.shape.part_nbytes
        ]
        first = sum(sizes[:part])
        numbers = numpy.arange(first, first + sizes[part], dtype=numpy.int64)
        model = numbers.reshape(*dims, self.shape.part_nbytes[part])
        model[:, : self.first] = NOTHING
        return model


def _regions(axes: str, parts: Sequence[Numbers]) -> list[Numbers]:
    """Take one axis after the other off, up to the blocks."""
    axis, inner = axes[0], axes[1:]
    if axis == "B":
        return [_within(inner, parts)]
    if axis == "K":
        return [region for part in parts for region in _regions(inner, [part])]
    return [
        region
        for index in range(len(parts[0]))
        for region in _regions(inner, [part[index] for part in parts])
    ]


def _within(axes: str, parts: Sequence[Numbers]) -> Numbers:
    if "K" in axes:
        kept = 1 + axes.index("K")
        flat = [part.reshape(*part.shape[:kept], -1) for part in parts]
        parts = [numpy.concatenate(flat, axis=-1)]
    return parts[0].reshape(len(parts[0]), -1)

"""Buffers and peers that show each other memory."""

from __future__ import annotations

from harness.buffer_fixtures import (
    cut_when,
    far_link,
    link,
    local,
    mappable,
    mapper,
    nccl_pair,
    no_slabs,
    on_gpu,
    pair,
    peers,
    pool,
    small_pieces,
)

__all__ = (
    "cut_when",
    "far_link",
    "link",
    "local",
    "mappable",
    "mapper",
    "nccl_pair",
    "no_slabs",
    "on_gpu",
    "pair",
    "peers",
    "pool",
    "small_pieces",
)

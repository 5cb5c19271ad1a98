"""The payload transports by the names that peers agree on."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Final

from asynckv.abc import PayloadTransport
from asynckv.transports.inline import InlineTransport
from asynckv.transports.mem import MemTransport

__all__ = ("TRANSPORTS",)

TRANSPORTS: Final[Mapping[str, type[PayloadTransport]]] = types.MappingProxyType(
    {transport.name: transport for transport in (InlineTransport, MemTransport)}
)
"""Each is made with ``(lanes, digest, loop, on_lost, max_chunk_bytes)``."""

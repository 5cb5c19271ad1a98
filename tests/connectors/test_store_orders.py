from __future__ import annotations

import msgspec

from asynckv.connectors.requests import StoreMetadata, StoreOrder


def test_orders_cross_processes() -> None:
    order = StoreOrder("r", ("k",), ((1,), (2,)))
    metadata = StoreMetadata((order,), (order,), ("x",))
    encoded = msgspec.msgpack.encode(metadata)
    assert msgspec.msgpack.decode(encoded, type=StoreMetadata) == metadata

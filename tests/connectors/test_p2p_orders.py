from __future__ import annotations

import msgspec

from asynckv.connectors.requests import LoadOrder, P2PMetadata, SaveOrder
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape


def test_orders_cross_processes() -> None:
    metadata = P2PMetadata(
        loads=(LoadOrder("r", "t", "P", ((1, 2),), shape=toy_shape(ToyModel())),),
        saves=(SaveOrder("s", "t", "", (1, 2), ((3,),)),),
        aborts=("x",),
    )
    encoded = msgspec.msgpack.encode(metadata)
    assert msgspec.msgpack.decode(encoded, type=P2PMetadata) == metadata

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from asynckv.protocol.frames import Frame
from asynckv.protocol.transfer_frames import (
    Exposed,
    OpenMemory,
    Proved,
)

DECODER = msgspec.msgpack.Decoder[Frame](Frame)
FRAMES: Final[tuple[msgspec.Struct, ...]] = (
    OpenMemory("pipe", "0" * 32),
    Exposed("asynckv-0", b"t" * 16, 2**30, b"h" * 64),
    Proved(b"n" * 16),
)
BOUNDS: dict[str, tuple[tuple[Any, Any], ...]] = {
    "of": (("inserts", "anything"), ("lookup", "")),
    "gpu_uuid": (("0" * 64, "0" * 65),),
    "address": (("a" * 256, "a" * 257),),
    "ticket": ((b"t" * 16, b"t" * 17),),
    "handle": ((b"h" * 64, b"h" * 65),),
    "nbytes": ((0, -1), (2**62, 2**62 + 1)),
    "digest": (("off", "none"),),
    "nonce": ((b"n" * 64, b"n" * 65),),
    "trace": ((b"t" * 64, b"t" * 65),),
}


CASES = [
    pytest.param(frame, field, *bound, id=f"{type(frame).__name__}.{field}-{number}")
    for frame in FRAMES
    for field in frame.__struct_fields__
    for number, bound in enumerate(BOUNDS[field])
]


@pytest.mark.parametrize(("frame", "field", "last", "beyond"), CASES)
def test_a_field_may_reach_its_bound_and_no_further(
    frame: msgspec.Struct, field: str, last: Any, beyond: Any
) -> None:
    value = msgspec.structs.replace(frame, **{field: last})
    assert DECODER.decode(msgspec.msgpack.encode(value)) == value
    value = msgspec.structs.replace(frame, **{field: beyond})
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(value))


def test_both_sides_compare_the_edges_unless_told_otherwise() -> None:
    assert Exposed("a", b"t", 1).digest == "edges"

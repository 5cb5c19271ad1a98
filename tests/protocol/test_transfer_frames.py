from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asynckv.protocol.frames import Frame
from asynckv.protocol.transfer_frames import MAX_EAGER, Eager, Grant, Sent

DECODER = msgspec.msgpack.Decoder[Frame](Frame)


@pytest.mark.parametrize("count", [0, MAX_EAGER])
def test_some_parts_come_with_a_frame(count: int) -> None:
    eager = Eager(1, tuple(range(count)), (b"d" * 16,) * count)
    assert DECODER.decode(msgspec.msgpack.encode(eager)) == eager


@pytest.mark.parametrize(
    "frame",
    [
        Eager(1, (0,) * (MAX_EAGER + 1)),
        Eager(1, (), (b"",) * (MAX_EAGER + 1)),
        Eager(1, (0,), (b"d" * 17,)),
        Eager(1, (-1,)),
    ],
    ids=["parts", "digests", "a digest", "a part"],
)
def test_more_than_can_be_is_refused(frame: Eager) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(frame))


COUNT = ((0, -1), (2**62, 2**62 + 1))
DIGESTS = tuple((kind, "none") for kind in ("full", "edges", "off"))
BOUNDS: dict[str, tuple[tuple[Any, Any], ...]] = {
    "Grant.digest": DIGESTS,
    "route": tuple((route, "post") for route in ("link", "nccl", "cuda_ipc")),
    "digest": ((b"d" * 16, b"d" * 17),),
    "kind": DIGESTS,
    **dict.fromkeys(("transfer", "part", "offset"), COUNT),
}
CASES = [
    pytest.param(frame, field, *bound, id=f"{type(frame).__name__}.{field}-{number}")
    for frame in (Grant(3), Sent(3, 1))
    for field in frame.__struct_fields__
    for number, bound in enumerate(
        BOUNDS.get(f"{type(frame).__name__}.{field}") or BOUNDS[field]
    )
]


@pytest.mark.parametrize(("frame", "field", "last", "beyond"), CASES)
def test_a_field_may_reach_its_bound_and_no_further(
    frame: msgspec.Struct, field: str, last: object, beyond: object
) -> None:
    value = msgspec.structs.replace(frame, **{field: last})
    assert DECODER.decode(msgspec.msgpack.encode(value)) == value
    value = msgspec.structs.replace(frame, **{field: beyond})
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(value))


def test_what_goes_by_the_link_is_said_in_few_bytes() -> None:
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(Sent(3, 1, b"digest")))
    assert said == {"t": "sent", "transfer": 3, "part": 1, "digest": b"digest"}
    granted = msgspec.msgpack.decode(msgspec.msgpack.encode(Grant(3)))
    assert granted == {"t": "grant", "transfer": 3}
    assert Sent(3, 1) == Sent(3, 1, b"", "full", "link", None)
    assert Grant(3) == Grant(3, "link", "full")

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from asynckv.protocol.frames import Frame, Offer, Pin, Pinned
from asynckv.protocol.transfer_frames import (
    MAX_EAGER,
    DeviceDone,
    DeviceGrant,
    DeviceMet,
    DeviceOffer,
    Devices,
    DeviceSkip,
    DeviceWithdraw,
    Eager,
    Exposed,
    Grant,
    MeetDevice,
    OpenDevices,
    OpenMemory,
    PrepareDevice,
    Proved,
    Sent,
)
from asynckv.protocol.values import MappedOffer, Place

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
FRAMES: Final[tuple[msgspec.Struct, ...]] = (
    Grant(3),
    Sent(3, 1),
    OpenDevices(b""),
    Devices(b""),
    PrepareDevice(),
    MeetDevice(0, b""),
    DeviceMet(0),
    DeviceOffer(0, 0, 0, 0, 0),
    DeviceGrant(0),
    DeviceSkip(0),
    DeviceWithdraw(0),
    DeviceDone(0),
    OpenMemory("pipe", "0" * 32),
    Exposed("asynckv-0", b"t" * 16, 2**30, b"h" * 64),
    Proved(b"n" * 16),
)
BOUNDS: dict[str, tuple[tuple[Any, Any], ...]] = {
    "Grant.digest": DIGESTS,
    "Exposed.digest": (("off", "none"),),
    "digest": ((b"d" * 16, b"d" * 17),),
    "route": tuple((route, "post") for route in ("link", "nccl", "cuda_ipc")),
    "kind": DIGESTS,
    "description": ((b"d" * 4096, b"d" * 4097),),
    "unique_id": ((b"u" * 128, b"u" * 129),),
    "trace": ((b"t" * 64, b"t" * 65),),
    "pipe": ((0, -1), (1, 2)),
    "of": (("inserts", "anything"), ("lookup", "")),
    "gpu_uuid": (("0" * 64, "0" * 65),),
    "address": (("a" * 256, "a" * 257),),
    "ticket": ((b"t" * 16, b"t" * 17),),
    "handle": ((b"h" * 64, b"h" * 65),),
    "nonce": ((b"n" * 64, b"n" * 65),),
    **dict.fromkeys(("number", "transfer", "part", "offset", "nbytes"), COUNT),
}
CASES = [
    pytest.param(frame, field, *bound, id=f"{type(frame).__name__}.{field}-{number}")
    for frame in FRAMES
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


def test_a_unique_id_is_shown_to_nobody() -> None:
    frame = MeetDevice(1, b"s3cret")
    assert "s3cret" not in repr(frame)
    assert "pipe=1" in str(frame)


def test_both_sides_compare_the_edges_unless_told_otherwise() -> None:
    assert Exposed("a", b"t", 1).digest == "edges"


def test_an_offer_of_mapped_memory_survives_the_wire() -> None:
    offer = Offer(1, False, mapped=MappedOffer(3, 70, b"e" * 16))
    assert DECODER.decode(msgspec.msgpack.encode(offer)) == offer


def test_memory_of_no_gpu_is_memory_of_the_host() -> None:
    request = OpenMemory("lookup")
    assert DECODER.decode(msgspec.msgpack.encode(request)) == request
    assert not request.gpu_uuid


@pytest.mark.parametrize(
    "place", [Place(((0, 1),) * 65, 0, 1), Place(((-1, 1),), 0, 1), Place((), -1, 1)]
)
def test_a_place_that_cannot_be_is_refused(place: Place) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(place), type=Place)


def test_a_pin_survives_the_wire() -> None:
    for frame in (Pin(("a", "b")), Pinned((True, False))):
        assert DECODER.decode(msgspec.msgpack.encode(frame)) == frame


@pytest.mark.parametrize(
    "frame", [Pin(("a",) * 4097), Pin(("a" * 513,)), Pinned((True,) * 4097)]
)
def test_what_is_longer_than_it_can_be_is_refused(frame: Frame) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(frame))

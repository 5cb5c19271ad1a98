from __future__ import annotations

import msgspec
import pytest

from asynckv.protocol.frames import Frame, Offer
from asynckv.protocol.transfer_frames import Mappable, Mapped, OpenMap
from asynckv.protocol.values import MappedOffer, Place

DECODER = msgspec.msgpack.Decoder[Frame](Frame)


def test_an_offer_of_mapped_memory_survives_the_wire() -> None:
    offer = Offer(1, False, mapped=MappedOffer(3, 70, b"e" * 16))
    assert DECODER.decode(msgspec.msgpack.encode(offer)) == offer


@pytest.mark.parametrize("frame", [OpenMap()])
def test_a_wish_for_memory_survives_the_wire(frame: Frame) -> None:
    assert DECODER.decode(msgspec.msgpack.encode(frame)) == frame


@pytest.mark.parametrize(
    "frame",
    [Mappable("a" * 257, b"", 1), Mappable("a", b"t" * 17, 1), Mapped(b"n" * 65)],
)
def test_what_is_longer_than_it_can_be_is_refused(frame: Frame) -> None:
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode(frame))


@pytest.mark.parametrize(
    "place", [Place(((0, 1),) * 65, 0, 1), Place(((-1, 1),), 0, 1), Place((), -1, 1)]
)
def test_a_place_that_cannot_be_is_refused(place: Place) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(place), type=Place)

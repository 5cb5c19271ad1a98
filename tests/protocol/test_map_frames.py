from __future__ import annotations

import msgspec
import pytest

from asynckv.protocol.frames import Frame, Offer
from asynckv.protocol.transfer_frames import OpenMemory
from asynckv.protocol.values import MappedOffer, Place

DECODER = msgspec.msgpack.Decoder[Frame](Frame)


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

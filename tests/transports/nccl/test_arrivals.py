from __future__ import annotations

import pytest

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.transfer_frames import DeviceOffer
from asynckv.tensors.cuda import DeviceMemory
from asynckv.transports.nccl.parts import Arrivals, DevicePart


def part(transfer: int, number: int = 0, nbytes: int = 10) -> DevicePart:
    memory = DeviceMemory(4096, nbytes, 0)
    return DevicePart(transfer, number, memory, lambda digest, error: None)


def offer(transfer: int, offset: int = 0, nbytes: int = 5) -> DeviceOffer:
    return DeviceOffer(0, transfer, 0, offset, nbytes)


def test_what_is_offered_of_a_part_is_found() -> None:
    arrivals = Arrivals()
    arrivals.add(one := part(3))
    assert arrivals.find(offer(3)) is one
    assert bool(arrivals) and arrivals.parts_of(3) == [one]


def test_nobody_wants_what_was_stopped() -> None:
    arrivals = Arrivals()
    arrivals.add(one := part(3))
    assert arrivals.stop(3) == [one]
    arrivals.check(offer(3))
    assert arrivals.find(offer(3)) is None


def test_what_was_never_announced_is_a_lie() -> None:
    arrivals = Arrivals()
    arrivals.announce(4)
    arrivals.check(offer(4))
    with pytest.raises(RemoteProtocolError, match="never announced"):
        arrivals.check(offer(5))


@pytest.mark.parametrize("wrong", [offer(3, 1), offer(3, 0, 11)])
def test_bytes_come_in_order_and_no_more_than_there_is_room_for(
    wrong: DeviceOffer,
) -> None:
    arrivals = Arrivals()
    arrivals.add(part(3))
    with pytest.raises(RemoteProtocolError, match="expected 10 at 0"):
        arrivals.find(wrong)


def test_a_part_that_has_landed_is_not_offered_again() -> None:
    arrivals = Arrivals()
    arrivals.add(one := part(3))
    arrivals.add(part(3, 1))
    arrivals.landed(one)
    with pytest.raises(RemoteProtocolError, match="has landed"):
        arrivals.find(offer(3))


def test_a_transfer_is_forgotten_with_its_last_part() -> None:
    arrivals = Arrivals()
    arrivals.add(one := part(3))
    arrivals.landed(one)
    assert not arrivals
    assert arrivals.find(offer(3)) is None


def test_a_part_is_waited_for_once() -> None:
    arrivals = Arrivals()
    arrivals.add(part(3))
    with pytest.raises(LocalProtocolError, match="twice"):
        arrivals.add(part(3))


def test_all_that_did_not_land_is_taken() -> None:
    arrivals = Arrivals()
    arrivals.add(one := part(3))
    arrivals.add(other := part(5))
    assert arrivals.take_all() == [one, other]
    assert not arrivals

from __future__ import annotations

import pytest

from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.transfer_frames import DeviceOffer
from asynckv.transports.nccl.directions import Arrivals, DevicePart


def part(transfer: int, number: int = 0, nbytes: int = 10) -> DevicePart:
    memory = DeviceMemory(4096, nbytes, 0)
    return DevicePart(transfer, number, memory, lambda digest, error: None)


def offer(transfer: int, offset: int = 0, nbytes: int = 5) -> DeviceOffer:
    return DeviceOffer(0, transfer, 0, offset, nbytes)


def test_what_is_offered_of_a_part_is_found() -> None:
    arrivals = Arrivals()
    arrivals.add(one := part(3))
    assert arrivals.find(offer(3)) is one
    one.moved_bytes = 4
    assert arrivals.landed_bytes(3) == 4


def test_nobody_wants_what_was_stopped() -> None:
    arrivals = Arrivals()
    arrivals.add(part(3))
    arrivals.stop(3)
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
    assert arrivals.find(offer(3)) is None


def test_a_part_is_waited_for_once() -> None:
    arrivals = Arrivals()
    arrivals.add(part(3))
    with pytest.raises(LocalProtocolError, match="twice"):
        arrivals.add(part(3))


def test_what_is_forgotten_is_wanted_by_nobody() -> None:
    arrivals = Arrivals()
    arrivals.add(part(3))
    arrivals.add(part(5))
    arrivals.clear()
    assert arrivals.find(offer(3)) is arrivals.find(offer(5)) is None

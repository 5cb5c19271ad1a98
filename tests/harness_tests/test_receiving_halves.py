from __future__ import annotations

from asynckv.errors import ChecksumError
from asynckv.protocol.transfer_frames import Grant
from asynckv.testing.blocked import until
from asynckv.testing.expectations import only
from harness.receiving_halves import HALF_BYTES, ReceivingHalf


async def test_what_rides_along_is_there_at_once() -> None:
    receiver = ReceivingHalf()
    receiver.push(100)
    assert only(await receiver.next()).nbytes == 100
    assert not (receiver.link.announced or receiver.broken)


async def test_what_is_large_lands_when_it_is_told_to() -> None:
    receiver = ReceivingHalf()
    receiver.push(HALF_BYTES)
    assert receiver.link.announced == [1]
    await until(lambda: Grant(1) in receiver.frames)
    receiver.land()
    assert only(await receiver.next()).nbytes == HALF_BYTES
    await receiver.half.granting.aclose()


async def test_another_digest_than_was_sent_breaks_it() -> None:
    receiver = ReceivingHalf()
    receiver.push(HALF_BYTES)
    await until(lambda: Grant(1) in receiver.frames)
    receiver.land(sent=b"e")
    assert [type(error) for error in receiver.broken] == [ChecksumError]
    await receiver.half.granting.aclose()

from __future__ import annotations

import random

from harness.simulation.wires import Conditions, Wire
from harness.simulation.world import World


class Sink:
    def __init__(self) -> None:
        self.data = bytearray()
        self.signals = list[str]()

    def receive_open(self) -> None:
        self.signals.append("open")

    def receive_bytes(self, data: bytes) -> bool:
        self.data += data
        return True

    def receive_end(self) -> None:
        self.signals.append("end")

    def receive_reset(self) -> None:
        self.signals.append("reset")

    def receive_silence(self) -> None:
        self.signals.append("silence")


class Stretch:
    """A wire, where it ends, and the world it is in."""

    def __init__(self, buffer_bytes: int = 10_000) -> None:
        self.world = World(1)
        self.sink = Sink()
        self.is_blocked = False
        self.wire = Wire(
            self.world,
            "a > b",
            Conditions(0.01, 0.01, 1000, buffer_bytes),
            lambda: self.is_blocked,
            chance=random.Random(1),
        )
        self.wire.receiver = self.sink

    def run(self) -> None:
        self.world.run(lambda: False, deadline=self.world.now + 100)


PAYLOAD = random.Random(2).randbytes(5000)


def test_bytes_arrive_later_in_slices_and_in_order() -> None:
    stretch = Stretch()
    assert stretch.wire.send(memoryview(PAYLOAD)) == len(PAYLOAD)
    stretch.wire.end()
    assert not stretch.sink.data
    stretch.run()
    assert bytes(stretch.sink.data) == PAYLOAD
    assert stretch.sink.signals == ["end"]
    assert stretch.world.story.events > 5


def test_no_more_is_taken_than_fits_until_it_was_read() -> None:
    stretch = Stretch(buffer_bytes=2000)
    assert stretch.wire.send(memoryview(PAYLOAD)) == 2000
    stretch.run()
    assert stretch.wire.room == 0
    stretch.wire.was_read(500)
    assert stretch.wire.room == 500


def test_what_is_blocked_arrives_in_order_when_it_is_not() -> None:
    stretch = Stretch()
    stretch.is_blocked = True
    stretch.wire.send(memoryview(PAYLOAD[:2500]))
    stretch.run()
    assert not stretch.sink.data
    stretch.wire.send(memoryview(PAYLOAD[2500:]))
    stretch.is_blocked = False
    stretch.wire.unblock()
    stretch.run()
    assert bytes(stretch.sink.data) == PAYLOAD


def test_a_flip_changes_one_bit() -> None:
    stretch = Stretch()
    stretch.wire.flips = 1
    stretch.wire.send(memoryview(PAYLOAD))
    stretch.run()
    changed = [a ^ b for a, b in zip(stretch.sink.data, PAYLOAD, strict=True) if a != b]
    assert [bin(change).count("1") for change in changed] == [1]


def test_small_slices_are_spared_a_flip() -> None:
    stretch = Stretch()
    stretch.wire.flips, stretch.wire.flips_from = 1, 1001
    stretch.wire.send(memoryview(PAYLOAD))
    stretch.run()
    assert bytes(stretch.sink.data) == PAYLOAD
    assert stretch.wire.flips == 1
    assert stretch.wire.carried_bytes == len(PAYLOAD)


def test_a_flip_can_be_called_off() -> None:
    stretch = Stretch()
    stretch.wire.flips = 1
    stretch.wire.flip_no_more()
    stretch.wire.send(memoryview(PAYLOAD))
    stretch.run()
    assert bytes(stretch.sink.data) == PAYLOAD


def test_a_dead_wire_swallows_everything() -> None:
    stretch = Stretch()
    stretch.wire.send(memoryview(PAYLOAD))
    stretch.wire.is_dead = True
    stretch.run()
    assert not stretch.sink.data


def test_a_wire_tells_when_so_many_bytes_have_come() -> None:
    stretch, told = Stretch(), list[int]()
    stretch.wire.cut_after = 2000
    stretch.wire.on_cut = lambda: told.append(len(stretch.sink.data))
    stretch.wire.send(memoryview(PAYLOAD))
    stretch.run()
    assert len(told) == 1
    assert 2000 <= told[0] <= 3000


def test_a_receiver_that_asks_is_told_of_the_silence() -> None:
    stretch = Stretch()
    stretch.wire.ask_for(30)
    stretch.wire.die()
    stretch.world.run(lambda: False, deadline=29)
    assert stretch.sink.signals == []
    stretch.run()
    assert stretch.sink.signals == ["silence"]


def test_who_asks_a_wire_that_is_dead_is_told_too() -> None:
    stretch = Stretch()
    stretch.wire.die()
    stretch.wire.ask_for(30)
    stretch.run()
    assert stretch.sink.signals == ["silence"]

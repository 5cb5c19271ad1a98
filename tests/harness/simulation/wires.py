"""One direction of a simulated connection: bytes under way, and what befalls them.

Bytes arrive in order, in slices of any size, each after a delay. As on a real
network nothing is ever reordered or lost within a connection: what is blocked
arrives late, or the connection is over.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import random
import zlib
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from harness.simulation.world import World

__all__ = ("Conditions", "Receiver", "Wire")

_TINY: Final = 24
_SLOW_S: Final = 0.01
_TINY_SHARE: Final = 0.03
_LONGEST_DELAY_S: Final = 3.0
_GIVE_UP_S: Final = 924.6
"""As Linux does, unless ``TCP_USER_TIMEOUT`` says otherwise."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a network is like: drawn from the seed once."""

    latency_s: float
    jitter_s: float
    slice_bytes: int
    buffer_bytes: int

    @classmethod
    def draw(cls, chance: random.Random) -> Conditions:
        """Return a network between a fast LAN and a bad WAN."""
        latency_s = chance.choice((0.00005, 0.0005, 0.005, 0.04))
        return cls(
            latency_s=latency_s,
            jitter_s=latency_s * chance.choice((0.1, 1.0, 5.0)),
            slice_bytes=chance.choice((4096, 9000, 16384, 65536)),
            buffer_bytes=chance.choice((8192, 32768, 131072, 524288)),
        )

    @property
    def is_fast(self) -> bool:
        """Whether a round trip is over in a moment."""
        return self.latency_s < _SLOW_S

    def delay_s(self, chance: random.Random) -> float:
        """Draw how long a slice is under way."""
        return self.latency_s + self.jitter_s * chance.random() ** 3


class Receiver(Protocol):
    """Where a wire ends."""

    def receive_open(self) -> None:
        """The other side wants to connect, or agrees to."""

    def receive_bytes(self, data: bytes) -> bool:
        """Take bytes; ``False`` if they go nowhere."""

    def receive_end(self) -> None:
        """The other side will send nothing more."""

    def receive_reset(self) -> None:
        """The other side knows nothing of this connection any more."""

    def receive_silence(self) -> None:
        """Whether the other side is still there was asked, and nothing answered."""


class _Signal(enum.Enum):
    OPEN = "opens"
    END = "ends"
    RESET = "is reset"


_Item: TypeAlias = bytes | _Signal


class Wire:
    """Bytes from one socket to another. ``is_blocked()`` holds back what arrives."""

    def __init__(
        self,
        world: World,
        name: str,
        conditions: Conditions,
        is_blocked: Callable[[], bool],
        *,
        chance: random.Random,
    ) -> None:
        self.name = name
        self.receiver: Receiver | None = None
        self.unread_bytes = 0
        self.slowness = 1.0
        self.flips = 0
        """How many of the next slices lose a bit on their way."""
        self.flips_from = 2 * _TINY
        """Slices of fewer bytes are spared."""
        self.cut_after: int | None = None
        self.on_cut: Callable[[], None] | None = None
        self.is_dead = False
        """Whatever enters is never seen again: see :meth:`die`."""
        self.give_up_s = _GIVE_UP_S
        """How long the sender's kernel sends again what nobody acknowledges."""
        self.on_given_up: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.carried_bytes = 0
        """How many bytes have arrived in all."""
        self._silence_s: float | None = None
        self._delivered = 0
        self._world = world
        self._conditions = conditions
        self._is_blocked = is_blocked
        self._chance = chance
        self._last_arrival = 0.0
        self._held: collections.deque[_Item] = collections.deque()

    @property
    def room(self) -> int:
        """How many bytes the sender's kernel takes now."""
        return max(0, self._conditions.buffer_bytes - self.unread_bytes)

    def send(self, data: memoryview) -> int:
        """Take what there is room for; return how much that was."""
        taken = min(len(data), self.room)
        start = 0
        while start < taken:
            end = min(start + self._slice_bytes(), taken)
            self._enter(bytes(data[start:end]))
            start = end
        self.unread_bytes += taken
        return taken

    def open(self) -> None:
        """The sender wants to connect, or agrees to."""
        self._enter(_Signal.OPEN)

    def end(self) -> None:
        """The sender sends nothing more."""
        self._enter(_Signal.END)

    def reset(self) -> None:
        """The sender is gone."""
        self._enter(_Signal.RESET)

    def die(self) -> None:
        """Let whatever enters from now on never be seen again."""
        if not self.is_dead:
            self.is_dead = True
            self._ask()

    def ask_for(self, silence_s: float) -> None:
        """Let the receiver's kernel end a connection that is silent for so long."""
        self._silence_s = silence_s
        if self.is_dead:
            self._ask()

    def was_read(self, nbytes: int) -> None:
        """The receiving application took bytes: there is room for as many."""
        self.unread_bytes -= nbytes
        if self.on_room is not None:
            self.on_room()

    def flip_no_more(self) -> None:
        """Let pass what has not lost a bit by now."""
        self.flips = 0

    def unblock(self) -> None:
        """What was held back arrives."""
        while self._held and not self.is_dead:
            self._deliver(self._held.popleft())

    def _ask(self) -> None:
        if self._silence_s is not None and self.receiver is not None:
            self._world.call_later(self._silence_s, self.receiver.receive_silence)

    def _slice_bytes(self) -> int:
        if self._chance.random() < _TINY_SHARE:
            return self._chance.randint(1, _TINY)
        return self._chance.randint(_TINY, self._conditions.slice_bytes)

    def _enter(self, item: _Item) -> None:
        if self.is_dead:
            self._doubt()
            return
        delay_s = self._conditions.delay_s(self._chance) * self.slowness
        arrival = self._world.now + min(delay_s, _LONGEST_DELAY_S)
        self._last_arrival = max(self._last_arrival, arrival)
        self._world.call_at(self._last_arrival, self._arrive, item)

    def _arrive(self, item: _Item) -> None:
        if self.is_dead:
            self._doubt()
        elif self._held or self._is_blocked():
            self._held.append(item)
            self._doubt()
        else:
            self._deliver(item)

    def _doubt(self) -> None:
        """The sender's kernel begins to wait for an acknowledgement."""
        self._world.call_later(self.give_up_s, self._give_up, self._delivered)

    def _give_up(self, delivered: int) -> None:
        lost = self.is_dead or bool(self._held)
        if lost and self._delivered == delivered and self.on_given_up is not None:
            self.die()
            self.on_given_up()

    def _deliver(self, item: _Item) -> None:
        self._delivered += 1
        receiver = self.receiver
        if receiver is None:
            return
        if isinstance(item, _Signal):
            self._world.tell("bytes", "", f"{self.name} {item.value}")
            if item is _Signal.OPEN:
                receiver.receive_open()
            elif item is _Signal.END:
                receiver.receive_end()
            else:
                receiver.receive_reset()
            return
        self.carried_bytes += len(item)
        data = self._flipped(item) if self.flips else item
        text = f"{self.name}: {len(data)} bytes {zlib.crc32(data):08x}"
        self._world.tell("bytes", "", text)
        if not receiver.receive_bytes(data):
            self.was_read(len(data))
        if self.cut_after is not None:
            self._count(len(data))

    def _count(self, nbytes: int) -> None:
        self.cut_after = (self.cut_after or 0) - nbytes
        if self.cut_after <= 0 and self.on_cut is not None:
            self.cut_after = None
            self.on_cut()

    def _flipped(self, data: bytes) -> bytes:
        if len(data) < self.flips_from:
            return data
        self.flips -= 1
        place = self._chance.randrange(len(data) * 8)
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        self._world.tell("fault", "", f"{self.name}: bit {place} of a slice flips")
        return bytes(changed)

"""Both sides of one transfer, without a socket: what each says, and what moves.

Control goes in order, each way; what moves lands whenever it likes. A route between
GPUs may be lost at any moment, also when the peer knows nothing of it yet; either side
may stop; bytes may be changed on their way, and frames of another transfer come in
between. One seed, one story.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Sequence
from typing import Final

from asynckv.protocol.transfer import ReceiveState, SendState, Verdict
from asynckv.protocol.transfer_frames import Eager, Grant, RouteName, Sent
from asynckv.protocol.wire import digest_of

__all__ = ("TransferStory", "tell_transfer")

_TRANSFER: Final = 4
_ROUTES: Final[tuple[RouteName, ...]] = ("link", "nccl", "cuda_ipc")
_MAX_EAGER: Final = 4
_MAX_STEPS: Final = 400


class TransferStory:
    """One transfer of two or three parts, and what became of it."""

    def __init__(self, seed: int) -> None:
        self.random = chance = random.Random(seed)
        self.parts = [chance.randbytes(chance.choice((2, 8))) for _ in range(3)]
        del self.parts[chance.choice((2, 3)) :]
        self.routes = chance.choice((_ROUTES[:1], _ROUTES[:2], _ROUTES))
        self.sender = SendState(_TRANSFER, self.routes)
        self.receiver = ReceiveState(
            _TRANSFER,
            [len(part) for part in self.parts],
            max_eager_nbytes=_MAX_EAGER,
            confirms=chance.random() < 0.3,
        )
        self.to_sender = collections.deque[Grant | Sent]()
        self.to_receiver = collections.deque[tuple[Grant | Sent | Eager, bytes]]()
        self.moving: list[Callable[[], None]] = []
        """What lands next, in any order."""
        self.told: list[int] = []
        self.differed: list[int] = []
        self.memory: dict[int, bytes] = {}
        self.is_hostile = chance.random() < 0.2
        self.is_interrupted = chance.random() < 0.4
        self._absent = list(range(len(self.parts)))
        self._at_receiver: dict[int, Sent] = {}
        self._here: dict[int, bytes] = {}
        self._epoch = 0

    def run(self) -> None:
        """Let both sides go on until nothing is under way."""
        self._grant(self.random.choice(self.routes))
        for _ in range(_MAX_STEPS):
            steps = self._possible()
            if not steps:
                return
            self.random.choice(steps)()
            self._check()
        raise AssertionError("this transfer does not end")

    def _possible(self) -> list[Callable[[], None]]:
        steps = list[Callable[[], None]]()
        if self._absent:
            steps.append(self._add)
        if self.to_sender:
            steps.append(self._reach_sender)
        if self.to_receiver:
            steps.append(self._reach_receiver)
        for move in self.moving:
            steps.append(lambda move=move: self._move(move))  # type: ignore[misc]
        if steps and self.is_interrupted and self.random.random() < 0.15:
            return [
                self.random.choice((self._lose, self._lose, self._stop, self._late))
            ]
        return steps

    def _move(self, move: Callable[[], None]) -> None:
        self.moving.remove(move)
        move()

    # the sending side

    def _add(self) -> None:
        part = self._absent.pop(self.random.randrange(len(self._absent)))
        if self.sender.add(part):
            self._send([part])

    def _reach_sender(self) -> None:
        frame = self.to_sender.popleft()
        if isinstance(frame, Sent):  # it knows that the part was verified
            self.to_receiver.append((frame, b""))
            return
        parts = self.sender.on_grant(frame)
        if parts is not None:
            self._epoch += 1
            self._send(parts)

    def _send(self, parts: Sequence[int]) -> None:
        epoch, route = self._epoch, self.sender.route
        for part in parts:
            data = self.parts[part]
            if len(data) <= _MAX_EAGER:
                self.sender.left(part)
                eager = Eager(_TRANSFER, (part,), (digest_of(data),))
                self.to_receiver.append((eager, self._changed(data)))
            elif self.random.random() < 0.5:  # the frame may be first, or the bytes
                self._say(part, epoch)
                self.moving.append(lambda p=part: self._land(p, route))  # type: ignore[misc]
            else:
                self.moving.append(lambda p=part: self._leave(p, route, epoch))  # type: ignore[misc]

    def _leave(self, part: int, route: RouteName, epoch: int) -> None:
        self._land(part, route)
        self._say(part, epoch)

    def _say(self, part: int, epoch: int) -> None:
        if epoch == self._epoch:  # the transport of a stopped route tells nothing
            sent = self.sender.sent(part, digest_of(self.parts[part]))
            if sent is not None:
                assert not self.sender.is_stopped
                self.to_receiver.append((sent, b""))

    def _changed(self, data: bytes) -> bytes:
        if self.is_hostile and self.random.random() < 0.3:
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    # the receiving side

    def _grant(self, route: RouteName) -> None:
        self.to_sender.append(self.receiver.grant(route))

    def _land(self, part: int, route: RouteName) -> None:
        """The bytes of one part are there; by a route it compares them, too."""
        data = self._changed(self.parts[part])
        if route != self.receiver.route:
            return  # the transport of a lost route is quiet
        if route == "link":
            if part in self.receiver.landing and part not in self.receiver.verified:
                self.memory[part] = data  # else in front of what is there
            self._act(part, self.receiver.landed(part, digest_of(data)))
        else:
            self._here[part] = data
            self._compare(part)

    def _compare(self, part: int) -> None:
        if part not in self._here or part not in self._at_receiver:
            return
        data, sent = self._here.pop(part), self._at_receiver.pop(part)
        if part not in self.receiver.routed:
            return
        if digest_of(data) != sent.digest:
            self._act(part, "differs")
            return
        self.memory[part] = data
        self._act(part, self.receiver.came(part, sent.digest))

    def _reach_receiver(self) -> None:
        frame, body = self.to_receiver.popleft()
        if isinstance(frame, Eager):
            for part, _, sent in self.receiver.on_eager(frame, len(body)):
                self.memory[part] = body
                landed = digest_of(body)
                self._act(part, self.receiver.compare(part, landed, sent))
        elif isinstance(frame, Sent):
            verdict = self.receiver.on_sent(frame)
            if verdict == "read":
                self._at_receiver[frame.part] = frame
                self._compare(frame.part)
            else:
                self._act(frame.part, verdict)

    def _act(self, part: int, verdict: Verdict) -> None:
        if verdict == "differs":
            self.differed.append(part)
            self.receiver.stop()
        elif verdict == "verified":
            assert not self.receiver.is_stopped
            self.told.append(part)
        elif verdict == "confirm":
            self.to_sender.append(Sent(_TRANSFER, part, route=self.receiver.route))

    # what goes wrong

    def _lose(self) -> None:
        state = self.receiver
        if not state.is_stopped and state.routed:
            state.lose()
            self._here.clear()
            self._at_receiver.clear()
            self._grant("link")

    def _stop(self) -> None:
        self.random.choice((self.receiver, self.sender)).stop()

    def _late(self) -> None:
        """What another transfer before this has left behind counts for nothing."""
        before = self.receiver.verified.copy(), self.sender.route
        for frame in (Sent(_TRANSFER - 2, 0, b"other"), Sent(_TRANSFER - 2, 0)):
            assert self.receiver.on_sent(frame) == "waits"
        assert self.receiver.on_eager(Eager(_TRANSFER - 2, (0,)), 2) == []
        assert self.sender.on_grant(Grant(_TRANSFER - 2)) is None
        assert before == (self.receiver.verified, self.sender.route)

    # what holds, always and in the end

    def _check(self) -> None:
        assert len(self.told) == len(set(self.told))
        for part in self.told:
            assert self.memory[part] == self.parts[part]

    @property
    def is_whole(self) -> bool:
        """Was every part told, with the bytes that were sent?"""
        return sorted(self.told) == list(range(len(self.parts)))


def tell_transfer(seed: int) -> TransferStory:
    """Run one story, and check how it ends.

    :raises AssertionError: a promise was broken
    """
    story = TransferStory(seed)
    story.run()
    was_stopped = story.receiver.is_stopped or story.sender.is_stopped
    assert story.is_whole or was_stopped, "parts were lost"
    assert story.receiver.has_come is story.is_whole
    assert not story.differed or story.is_hostile
    return story

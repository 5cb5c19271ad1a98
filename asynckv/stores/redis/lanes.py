"""The lanes of a tier that nobody uses just now, by the server they go to.

A lane that was of use before may have ended since, or may not be ours any more, as
credentials were changed: then what was asked is asked again, on a new one, once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from asynckv.errors import ConfigError
from asynckv.stores.redis.lane import Lane, Reply, ServerError
from asynckv.stores.redis.server import Address
from asynckv.stores.redis.url import MAX_LANES

__all__ = ("Lanes", "ProcessLanes", "process_lanes")

_T = TypeVar("_T")

_NOT_OURS: Final = frozenset(("NOAUTH", "WRONGPASS", "NOPERM"))

_Answers: TypeAlias = "Sequence[Reply] | Exception"


class ProcessLanes:
    """The threads of all Redis tiers of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._taken = 0

    def take(self, count: int) -> None:
        """:raises ConfigError: there are not so many left"""
        with self._lock:
            if self._pid != os.getpid():  # a child has none of its parent's
                self._pid, self._taken = os.getpid(), 0
            if self._taken + count > MAX_LANES:
                raise ConfigError(
                    f"{count} lanes for a Redis tier, beside {self._taken} of others",
                    hint=f"a process has {MAX_LANES}: ?lanes=3 takes fewer for a tier",
                )
            self._taken += count

    def give_back(self, count: int) -> None:
        """Others may take so many again."""
        with self._lock:
            if self._pid == os.getpid():
                self._taken -= count


process_lanes: Final = ProcessLanes()


class Lanes:
    """Lanes that ``connect`` makes. To be called by threads; it blocks."""

    def __init__(self, connect: Callable[[Address], Lane]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Lane]] = {}
        self._is_closed = False

    def __len__(self) -> int:
        """How many wait for work."""
        with self._lock:
            return sum(map(len, self._idle.values()))

    def use(self, address: Address, work: Callable[[Lane], _T]) -> _T:
        """Return what ``work`` makes of a lane, after which it is as it was before.

        It may be called twice. A :exc:`ServerError` that it raises is an answer as any
        other; what else it raises ends the lane.
        """
        return self._use_or_again(address, self.take(address), work, work)

    def ask(self, groups: Mapping[Address, Sequence[bytes]]) -> dict[Address, _Answers]:
        """Send commands to many servers at once; return what each has answered."""
        sent: dict[Address, Lane] = {}
        answers: dict[Address, _Answers] = {}
        try:
            for address, commands in groups.items():
                try:
                    sent[address] = self.take(address)
                    sent[address].send([b"".join(commands)])
                except (OSError, ServerError) as exc:
                    if address not in sent:
                        answers[address] = exc
            for address in list(sent):
                answers[address] = self._answers(
                    address, groups[address], sent.pop(address)
                )
        finally:
            for lane in sent.values():
                lane.close()
        return answers

    def take(self, address: Address) -> Lane:
        """Return a lane that is nobody else's, until it is given back or closed."""
        with self._lock:
            idle = self._idle.get(address)
            if idle:
                return idle.pop()
        return self._connect(address)

    def give_back(self, address: Address, lane: Lane) -> None:
        """Others may use it now."""
        lane.is_new = False
        with self._lock:
            if not self._is_closed:
                self._idle.setdefault(address, []).append(lane)
                return
        lane.close()

    def close(self) -> None:
        """End all that wait, and what is given back from now on."""
        with self._lock:
            self._is_closed = True
            idle = [lane for lanes in self._idle.values() for lane in lanes]
            self._idle.clear()
        for lane in idle:
            lane.close()

    def _answers(
        self, address: Address, commands: Sequence[bytes], sent: Lane
    ) -> _Answers:
        def read(lane: Lane) -> Sequence[Reply]:
            answers = lane.read_replies(len(commands))
            for one in answers:
                if isinstance(one, ServerError) and one.code in _NOT_OURS:
                    raise one
            return answers

        def ask(lane: Lane) -> Sequence[Reply]:
            lane.send([b"".join(commands)])
            return read(lane)

        try:
            return self._use_or_again(address, sent, read, ask)
        except Exception as exc:  # noqa: BLE001 - it is what came of it
            return exc

    def _use_or_again(
        self,
        address: Address,
        lane: Lane,
        work: Callable[[Lane], _T],
        again: Callable[[Lane], _T],
    ) -> _T:
        """Return what ``work`` makes of a lane, or ``again`` of a new one, if worn."""
        try:
            return self._use(address, lane, work)
        except (ConnectionError, ServerError) as exc:
            is_answer = isinstance(exc, ServerError) and exc.code not in _NOT_OURS
            if lane.is_new or is_answer:
                raise
        self._close_idle(address)
        return self._use(address, self.take(address), again)

    def _use(self, address: Address, lane: Lane, work: Callable[[Lane], _T]) -> _T:
        try:
            result = work(lane)
        except ServerError as error:
            if error.code in _NOT_OURS:
                lane.close()
            else:
                self.give_back(address, lane)
            raise
        except BaseException:
            lane.close()
            raise
        self.give_back(address, lane)
        return result

    def _close_idle(self, address: Address) -> None:
        """What one lane has suffered, the others have."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for lane in idle:
            lane.close()

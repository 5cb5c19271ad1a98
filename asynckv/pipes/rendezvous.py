"""Where the ranks of a group meet: at rank 0, which knows who is missing.

Rank 0 leads: it tells everybody when all have come and where each one is, and lets them
pass their barriers. The others follow.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Literal, TypeAlias

from asynckv.errors import ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.address import LOOPBACK, Address
from asynckv.links.link import Link, LinkStream
from asynckv.observability.waits import LoggedWait
from asynckv.protocol.failures import from_failure, to_failure
from asynckv.protocol.frames import Arrived, Failure, Frame, JoinGroup, Members, Missing
from asynckv.waits.waiting import Watchers

__all__ = (
    "Barrier",
    "Follower",
    "Leader",
    "Rendezvous",
    "name_ranks",
)


class Barrier:
    """Calls ``arrive(number)`` when this rank comes to the barrier of that number."""

    def __init__(self, arrive: Callable[[int], None]) -> None:
        self.arrived = 0
        self.released = 0
        self._arrive = arrive
        self._passed = 0
        self._watchers = Watchers()
        self._error: PeerLost | None = None

    async def wait(self) -> None:
        """Wait until every rank has come here.

        A cancelled call has come all the same: the next call waits at the same
        barrier. So do calls that wait at the same time.

        :raises PeerLost: some rank is gone; no barrier is passed any more
        """
        number = self._passed + 1
        if self.arrived < number and self._error is None:
            self.arrived = number
            self._arrive(number)
        while self.released < number:
            if self._error is not None:
                raise PeerLost(self._error.message, hint=self._error.hint)
            with LoggedWait(
                f"barrier {number}", "every rank to come", "the last one, or a loss"
            ):
                await self._watchers.next_change(asyncio.get_running_loop())
        self._passed = max(self._passed, number)

    def release(self, number: int) -> None:
        """Every rank has come to the barrier of that number. Never waits.

        :raises RemoteProtocolError: this rank has not, or passed it before
        """
        if number != self.released + 1 or number > self.arrived:
            raise RemoteProtocolError(f"barrier {number} cannot be passed now")
        self.released = number
        self._watchers.wake()

    def end(self, error: PeerLost) -> None:
        """No barrier is passed any more. Never waits."""
        self._error = self._error or error
        self._watchers.wake()


_Ended: TypeAlias = Callable[[PeerLost], None]


def name_ranks(ranks: tuple[int, ...]) -> str:
    """Return "rank 2" or "ranks 2, 3 and 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


class _Seat:
    """One other rank that has come to rank 0."""

    def __init__(self, leader: Leader, stream: LinkStream, frame: JoinGroup) -> None:
        self.rank = frame.rank
        self.port = frame.port
        self.stream = stream
        self.arrived = 0
        self._leader = leader

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if not isinstance(frame, Arrived) or frame.number != self.arrived + 1:
            raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")
        self.arrived = frame.number
        self._leader.advance()

    def on_lost(self, error: PeerLost) -> None:
        self._leader.lose(self, error)


class Leader:
    """Rank 0's side. ``ended`` is told when the group can no longer be whole.

    It says where everybody is: on the host that the rank has come from, at the
    port that it has said.
    """

    def __init__(
        self, size: int, ended: _Ended, scheme: Literal["tcp", "tls"] = "tcp"
    ) -> None:
        self.size = size
        self.barrier = Barrier(lambda _: self.advance())
        self._ended = ended
        self._scheme: Literal["tcp", "tls"] = scheme
        self._seats: dict[int, _Seat] = {}
        self._never_came = set(range(1, size))
        self._members: asyncio.Future[Members] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def missing(self) -> tuple[int, ...]:
        """Who has never come, or has left again if all have; later, who is not at the
        barrier.
        """
        if not self._members.done():
            away = set(range(1, self.size)) - self._seats.keys()
            return tuple(sorted(away & self._never_came or away))
        return tuple(
            seat.rank
            for seat in self._seats.values()
            if seat.arrived <= self.barrier.released
        )

    async def members(self) -> Members:
        """Wait until all have come, and return where they are."""
        await asyncio.wait({self._members})
        return self._members.result()

    def seat(self, stream: LinkStream, frame: JoinGroup) -> _Seat:
        """A rank comes.

        :raises ConfigError: it is no rank of this group, or was here before; or all
            have come, and one has left
        """
        if frame.size != self.size or not 0 < frame.rank < self.size:
            raise ConfigError(
                f"rank {frame.rank} of {frame.size} came to a group of {self.size}",
                hint="every rank needs the same size, and a rank of its own",
            )
        if frame.rank in self._seats:
            raise ConfigError(
                f"rank {frame.rank} is here already",
                hint="every rank needs a rank of its own",
            )
        if self._members.done():
            raise ConfigError(
                f"rank {frame.rank} comes to a group that has broken up",
                hint="open the group again on every rank",
            )
        seat = self._seats[frame.rank] = _Seat(self, stream, frame)
        self._never_came.discard(frame.rank)
        asyncio.get_running_loop().call_soon(self._notify)
        return seat

    def lose(self, seat: _Seat, error: PeerLost) -> None:
        """A rank is gone: before all have come, it may come again."""
        if self._seats.get(seat.rank) is not seat:
            return
        del self._seats[seat.rank]
        if not self._members.done():
            self._notify()
            return
        what = "has left the group" if error.goodbye else f"is lost: {error.message}"
        self.end(PeerLost(f"rank {seat.rank} {what}"))

    def end(self, error: PeerLost) -> None:
        """Tell everybody that the group is no longer whole. Never waits."""
        seats, self._seats = self._seats, {}
        for seat in seats.values():
            seat.stream.send(to_failure(error))
            seat.stream.close()
        self.barrier.end(error)
        self._ended(error)

    def advance(self) -> None:
        """Let everybody pass if everybody is here."""
        number = self.barrier.released + 1
        if self.barrier.arrived < number or not self._members.done() or self.missing:
            return
        for seat in self._seats.values():
            seat.stream.send(Arrived(number))
        self.barrier.release(number)

    def _notify(self) -> None:
        if self._members.done():
            return
        if missing := self.missing:
            frame: Missing | Members = Missing(missing)
        else:
            urls = [self._url_of(rank) for rank in range(1, self.size)]
            frame = Members(secrets.token_hex(8), ("", *urls))
            self._members.set_result(frame)
        for seat in self._seats.values():
            seat.stream.send(frame)

    def _url_of(self, rank: int) -> str:
        seat = self._seats[rank]
        host = seat.stream.link.peer_host or LOOPBACK
        return str(Address(self._scheme, host=host, port=seat.port))


class Follower:
    """The side of every other rank, over its link to rank 0."""

    def __init__(
        self, link: Link, rank: int, size: int, port: int, ended: _Ended
    ) -> None:
        self.missing: tuple[int, ...] = ()
        self.was_refused = False
        self.barrier = Barrier(self._arrive)
        self._size = size
        self._ended = ended
        self._members: asyncio.Future[Members] = (
            asyncio.get_running_loop().create_future()
        )
        self._stream = link.open_stream(self, JoinGroup(rank, size, port))

    async def members(self) -> Members:
        """Wait until all have come, and return where they are.

        :raises PeerLost: rank 0 is gone, or has given up
        :raises ConfigError: rank 0 knows another group
        """
        await asyncio.wait({self._members})
        return self._members.result()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Missing(ranks=ranks):
                self.missing = ranks
            case Members(urls=urls):
                if self._members.done() or len(urls) != self._size:
                    raise RemoteProtocolError("the members of another group")
                self.missing = ()
                self._members.set_result(frame)
            case Arrived(number=number):
                self.barrier.release(number)
            case Failure():
                self.was_refused = True
                self._end(from_failure(frame))
            case _:
                error = RemoteProtocolError(f"no {type(frame).__name__} belongs here")
                self._end(error)  # of a last frame's stream nobody else is told
                raise error

    def on_lost(self, error: PeerLost) -> None:
        what = "has left the group" if error.goodbye else f"is lost: {error.message}"
        self._end(PeerLost(f"rank 0 {what}"))

    def _arrive(self, number: int) -> None:
        self._stream.send(Arrived(number))

    def _end(self, error: Exception) -> None:
        if not self._members.done():
            self._members.set_exception(error)
            self._members.exception()  # seen: it may be that nobody waits for it
        lost = error if isinstance(error, PeerLost) else PeerLost(str(error))
        self.barrier.end(lost)
        self._ended(lost)


Rendezvous: TypeAlias = Leader | Follower

"""One rank's side of a group's barriers: it comes to one, and may pass when told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.observability.waits import LoggedWait

__all__ = ("Barrier",)


class Barrier:
    """Calls ``arrive(number)`` when this rank comes to the barrier of that number."""

    def __init__(self, arrive: Callable[[int], None]) -> None:
        self.arrived = 0
        self.released = 0
        self._arrive = arrive
        self._passed = 0
        self._waiting: list[asyncio.Future[None]] = []
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
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(watcher)
            with LoggedWait(
                f"barrier {number}", "every rank to come", "the last one, or a loss"
            ):
                await watcher
        self._passed = max(self._passed, number)

    def release(self, number: int) -> None:
        """Every rank has come to the barrier of that number. Never waits.

        :raises RemoteProtocolError: this rank has not, or passed it before
        """
        if number != self.released + 1 or number > self.arrived:
            raise RemoteProtocolError(f"barrier {number} cannot be passed now")
        self.released = number
        self._wake()

    def end(self, error: PeerLost) -> None:
        """No barrier is passed any more. Never waits."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for watcher in waiting:
            if not watcher.done():
                watcher.set_result(None)

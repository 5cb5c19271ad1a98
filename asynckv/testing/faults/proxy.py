"""A proxy between a dialler and a listener, on which faults are put."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import socket
from collections.abc import Sequence
from typing import Any, Final, Self, TypeVar

import anyio

from asynckv.abc.closing import Closable
from asynckv.links.securing import wait_readable
from asynckv.testing.faults.fault import Fault
from asynckv.testing.faults.injectors import Injectors
from asynckv.testing.faults.passages import Passage, ProxyCounts, close_with_reset
from asynckv.testing.faults.places import Place, place_of, prepared

__all__ = ("Proxy",)

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Fault)
_NO_FILES_PAUSE_S: Final = 0.1


class Proxy(Injectors, Closable):
    """Carries every connection made to :attr:`url` on to ``url``, while entered.

    For ``tcp://`` (and ``tls://``, which it cannot look into) and ``unix://``.
    Without a fault it changes nothing and keeps to the pace of the slower side.
    Payload that would go another way (shared memory) is made to go through it.

    ``heartbeat_ms`` makes the two sides notice a silent peer sooner: it changes
    the limits that they agree on, which sides with a shared secret would notice.
    """

    def __init__(self, url: str, *, heartbeat_ms: int | None = None) -> None:
        self._target = place_of(url)
        self._heartbeat_ms = heartbeat_ms
        self._faults: list[Fault] = []
        self._passages: set[Passage] = set()
        self._arrivals: dict[asyncio.Task[bool], socket.socket] = {}
        self._numbers = itertools.count()
        self._counts = ProxyCounts()
        self._place: Place | None = None
        self._accepting: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """What to dial instead of the listener.

        :raises RuntimeError: the proxy was not entered yet
        """
        if self._place is None:
            raise RuntimeError("the proxy has no address before it is entered")
        return self._place.url

    @property
    def target(self) -> str:
        """Whom it dials. May be set to another URL, for connections to come."""
        return self._target.url

    @target.setter
    def target(self, url: str) -> None:
        self._target = place_of(url)

    @property
    def counts(self) -> ProxyCounts:
        """What has passed so far."""
        return dataclasses.replace(self._counts)

    @property
    def open_connections(self) -> int:
        """How many there are now."""
        return len(self._passages)

    @property
    def faults(self) -> Sequence[Fault]:
        """Those that were put on it; not all of them are on."""
        return tuple(self._faults)

    def add(self, fault: _F) -> _F:
        """Put ``fault`` on this proxy, behind the others; it begins by itself.

        :raises RuntimeError: it is on another one
        """
        fault.put_on(self)
        self._faults.append(fault)
        return fault

    def wake(self) -> None:
        """Judge anew what is held: a fault was switched."""
        for passage in self._passages:
            passage.wake()

    async def __aenter__(self) -> Self:
        if self._place is not None:
            raise RuntimeError("the proxy was entered before; make a new one")
        self._place, sock = await self._target.listen_beside()
        self._accepting = asyncio.get_running_loop().create_task(
            self._accept_forever(sock), name=f"proxy of {self.target}"
        )
        self._accepting.add_done_callback(lambda _: sock.close())
        return self

    async def aclose(self) -> None:
        """Reset what is open, and listen no more. Bounded, shielded, repeatable."""
        self.abort()
        with anyio.CancelScope(shield=True):
            if tasks := self._tasks():
                await asyncio.wait(tasks)
            if self._place is not None:
                await self._place.remove()

    def abort(self) -> None:
        """As :meth:`aclose`, at once; a unix socket's file stays. Never waits."""
        for task in self._tasks():
            task.cancel()
        for passage in tuple(self._passages):
            passage.cut(resets=True)

    def _tasks(self) -> set[asyncio.Task[Any]]:
        return {task for task in (self._accepting, *self._arrivals) if task is not None}

    async def _accept_forever(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Not sock_accept: what it has accepted when it is cancelled stays open.
            await wait_readable(listening)
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                continue
            except OSError as exc:
                logger.warning("cannot accept before %s: %s", self.target, exc)
                await asyncio.sleep(_NO_FILES_PAUSE_S)
                continue
            task = loop.create_task(self._carry(sock), name="asynckv: a connection")
            self._arrivals[task] = sock
            task.add_done_callback(self._on_arrived)

    def _on_arrived(self, task: asyncio.Task[bool]) -> None:
        # Here, since a task that is cancelled before it starts closes nothing.
        sock = self._arrivals.pop(task)
        if task.cancelled() or not task.result():
            close_with_reset(sock)

    async def _carry(self, near: socket.socket) -> bool:
        """Join what has come with a connection to the listener, if that is there."""
        try:
            far = await self._target.connect()
        except OSError as exc:
            logger.debug("nobody listens at %s: %s", self.target, exc)
            return False
        passage = Passage(
            prepared(near),
            far,
            number=next(self._numbers),
            faults=self._faults,
            counts=self._counts,
            on_over=self._passages.discard,
            heartbeat_ms=self._heartbeat_ms,
        )
        self._passages.add(passage)
        passage.start()
        return True

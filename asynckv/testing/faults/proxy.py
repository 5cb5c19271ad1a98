"""A proxy between a dialler and a listener, on which faults are put.

One fault alone is ``async with latency(url, 0.05) as fault``: each function here stands
a proxy before the listener at ``url``, puts one fault on it and yields the fault;
``fault.url`` is what to dial. Its other arguments are those of the method of that name
(:class:`~asynckv.testing.faults.injectors.Injectors`).

What shapes or damages the traffic is on from the start. What holds it or ends it
(:func:`stall`, :func:`black_hole`, :func:`reset`, :func:`half_close`) waits for
``fault.begin()``: the sides have to meet first.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, Final, Literal, ParamSpec, Self, TypeVar

import anyio

from asynckv.abc.closing import Closable
from asynckv.links.sockets import wait_readable
from asynckv.testing.faults.fault import Fault, Flow, Greeting
from asynckv.testing.faults.injectors import Injectors
from asynckv.testing.faults.places import Place, place_of, prepared

__all__ = (
    "Passage",
    "Proxy",
    "ProxyCounts",
    "bit_flip",
    "black_hole",
    "close_with_end",
    "close_with_reset",
    "cut_after",
    "half_close",
    "latency",
    "rate",
    "reset",
    "stall",
    "tiny_slices",
)


_DISCARD_BYTES: Final = 256 * 1024
_MAX_DISCARDS: Final = 64
_NO_LINGER: Final = struct.pack("ii", 1, 0)


@dataclasses.dataclass
class ProxyCounts:
    """What has passed. ``max_held_bytes``: the most at a time, in one direction."""

    connections: int = 0
    control: int = 0
    lanes: int = 0
    bytes_to_listener: int = 0
    bytes_to_dialler: int = 0
    max_held_bytes: int = 0


class Passage:
    """Carries bytes both ways between two connected sockets, which it owns.

    ``on_over(passage)`` is called once, when both are closed.
    """

    def __init__(
        self,
        near: socket.socket,
        far: socket.socket,
        *,
        number: int,
        faults: Sequence[Fault],
        counts: ProxyCounts,
        on_over: Callable[[Passage], None],
        heartbeat_ms: int | None = None,
    ) -> None:
        self._sockets: tuple[socket.socket, ...] = (near, far)
        self._counts = counts
        self._on_over = on_over
        self._hello = Greeting(heartbeat_ms)
        self._kind_is_counted = False
        answer = Greeting(heartbeat_ms)
        if heartbeat_ms is None:
            answer.rest()  # there is nothing to learn from it
        self._flows = (
            Flow(self, (near, far), "to_listener", number, self._hello, faults),
            Flow(self, (far, near), "to_dialler", number, answer, faults),
        )
        counts.connections += 1

    @property
    def kind(self) -> Literal["control", "lanes", ""]:
        """What the dialler's first frame says it is; empty while that is unknown."""
        return self._hello.kind

    def start(self) -> None:
        """Begin to carry."""
        for flow in self._flows:
            flow.start()

    def wake(self) -> None:
        """Judge anew what is held."""
        for flow in self._flows:
            flow.wake()

    def cut(self, *, resets: bool) -> None:
        """Close both sockets now. Safe to call again."""
        if self._sockets:
            for flow in self._flows:
                flow.stop()
            for sock in self._sockets:
                close_with_reset(sock) if resets else close_with_end(sock)
            self._sockets = ()
            self._on_over(self)

    # What a flow says.

    def flow_is_over(self) -> None:
        """One direction has ended; with the other, the connection has."""
        if all(flow.is_over for flow in self._flows):
            self.cut(resets=False)

    def count(self, flow: Flow, sent: int, held: int) -> None:
        """A flow has sent, and holds, as many bytes."""
        counts = self._counts
        if flow.direction == "to_listener":
            counts.bytes_to_listener += sent
        else:
            counts.bytes_to_dialler += sent
        counts.max_held_bytes = max(counts.max_held_bytes, held)
        if self.kind and not self._kind_is_counted:
            self._kind_is_counted = True
            counts.control += self.kind == "control"
            counts.lanes += self.kind == "lanes"


def close_with_end(sock: socket.socket) -> None:
    """Close ``sock`` by a FIN: with something unread it would be an RST.

    Who goes on sending to it is answered by an RST, as by any closed socket.
    """
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        for _ in range(_MAX_DISCARDS):
            if not sock.recv(_DISCARD_BYTES):
                break
    sock.close()


def close_with_reset(sock: socket.socket) -> None:
    """Close ``sock`` by an RST, if it is a TCP one; what it had to send is lost."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    sock.close()


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


_P = ParamSpec("_P")


def _before(
    make: Callable[Concatenate[Proxy, _P], _F], *, begins: bool
) -> Callable[Concatenate[str, _P], AbstractAsyncContextManager[_F]]:
    @contextlib.asynccontextmanager
    async def opened(
        url: str, /, *args: _P.args, **options: _P.kwargs
    ) -> AsyncIterator[_F]:
        async with Proxy(url) as proxy:
            fault = make(proxy, *args, **options)
            if begins:
                fault.begin()
            yield fault

    opened.__name__ = opened.__qualname__ = make.__name__
    opened.__doc__ = make.__doc__
    return opened


latency = _before(Proxy.latency, begins=True)
rate = _before(Proxy.rate, begins=True)
tiny_slices = _before(Proxy.tiny_slices, begins=True)
cut_after = _before(Proxy.cut_after, begins=True)
bit_flip = _before(Proxy.bit_flip, begins=True)
stall = _before(Proxy.stall, begins=False)
black_hole = _before(Proxy.black_hole, begins=False)
reset = _before(Proxy.reset, begins=False)
half_close = _before(Proxy.half_close, begins=False)

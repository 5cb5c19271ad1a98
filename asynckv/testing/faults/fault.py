"""A fault: whom it concerns, whether it is on, and what it has done.

A fault never waits and does no I/O. Each direction of each connection asks it,
piece by piece, how long to hold what comes, how much may go on, and as what.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from asynckv.testing.faults.flows import Flow, Piece

__all__ = ("Cut", "Direction", "Fault", "FaultCounts", "Kind", "Wire")

Direction: TypeAlias = Literal["to_listener", "to_dialler", "both"]
"""Which way the bytes go that a fault concerns."""

Kind: TypeAlias = Literal["control", "lanes", "both"]
"""Which connections a fault concerns: a link's one control, or its payload lanes.

Only the dialler's first bytes tell. A connection that has sent none, or none of
asynckv, is neither; ``"both"`` concerns it too.
"""


class Cut(Exception):
    """The connection ends here. Raised by a fault, never seen by its user."""

    def __init__(self, *, resets: bool) -> None:
        super().__init__(resets)
        self.resets = resets


class Wire(Protocol):
    """What a fault is put on: a :class:`Proxy`."""

    @property
    def url(self) -> str:
        """What to dial, instead of the listener."""

    def wake(self) -> None:
        """A fault was switched: let everything that is held be judged again."""


@dataclasses.dataclass(frozen=True)
class FaultCounts:
    """What a fault did, so that a test can prove that it happened.

    ``acts`` counts what it is there for: pieces held or sliced, bits flipped,
    connections ended. ``nbytes`` went through it (or were swallowed by it) while
    it was on, on ``connections``.
    """

    acts: int = 0
    nbytes: int = 0
    connections: int = 0


class Fault:
    """Something that goes wrong between two peers, from ``begin()`` to ``end()``.

    ``with fault:`` begins and ends it; it may begin again. By itself it does
    nothing: subclasses override what they need of the five methods at the end,
    which are called on the event loop and must not wait.
    """

    swallows: ClassVar[bool] = False
    """Whether bytes may be lost in it, and the connection has to outlive that."""

    def __init__(self, *, direction: Direction = "both", kind: Kind = "both") -> None:
        self.direction = direction
        self.kind = kind
        self._wire: Wire | None = None
        self._is_on = False
        self._acts = 0
        self._nbytes = 0
        # Numbers, not flows: a connection has one for both directions.
        self._connections: set[int] = set()
        self._passed: weakref.WeakKeyDictionary[Flow, int]
        self._passed = weakref.WeakKeyDictionary()
        self._acted = asyncio.Event()

    def __repr__(self) -> str:
        state = "on" if self._is_on else "off"
        return f"<{type(self).__name__} of {self.direction}, {self.kind}: {state}>"

    @property
    def is_on(self) -> bool:
        """Whether it has begun and not ended."""
        return self._is_on

    @property
    def counts(self) -> FaultCounts:
        """What it did so far, in all."""
        return FaultCounts(self._acts, self._nbytes, len(self._connections))

    @property
    def url(self) -> str:
        """What to dial to get it: its proxy's.

        :raises RuntimeError: it is on no proxy
        """
        return self._on_a_wire().url

    def put_on(self, wire: Wire) -> None:
        """Belong to ``wire``; what :meth:`Proxy.add` does.

        :raises RuntimeError: it is on another one
        """
        if self._wire is not None:
            raise RuntimeError("a fault is for one proxy; make another one")
        self._wire = wire

    def begin(self) -> None:
        """Go wrong from now on. What it counts on each connection starts anew.

        :raises RuntimeError: it is on no proxy
        """
        wire = self._on_a_wire()
        self._is_on = True
        self._passed.clear()
        self._acted.clear()
        wire.wake()

    def end(self) -> None:
        """Go wrong no longer; what was done stays done. Safe to call again."""
        self._is_on = False
        if self._wire is not None:
            self._wire.wake()

    async def acted(self) -> None:
        """Wait until it has acted since it began. A cancelled call is no call."""
        await self._acted.wait()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def concerns(self, flow: Flow) -> bool:
        """Whether it is on, and meant for that direction of that connection."""
        return (
            self._is_on
            and self.direction in ("both", flow.direction)
            and self.kind in ("both", flow.kind)
        )

    def note(self, flow: Flow, *, acts: int = 0, nbytes: int = 0) -> None:
        """Count, for subclasses."""
        self._connections.add(flow.number)
        self._acts += acts
        self._nbytes += nbytes
        if acts:
            self._acted.set()

    def passed_bytes(self, flow: Flow) -> int:
        """How many bytes went on there since it began, for subclasses."""
        return self._passed.get(flow, 0)

    # What subclasses override.

    def judge(self, flow: Flow) -> None:
        """Look at a connection, at every turn. May raise :exc:`Cut`."""

    def delay_s(self, flow: Flow, piece: Piece, now: float) -> float:
        """Return for how long ``piece`` is held yet; ``inf``: until it ends."""
        return 0.0

    def allowance(self, flow: Flow) -> int | None:
        """Return how many bytes may go on in one write (1 or more), if bounded."""
        return None

    def change(self, flow: Flow, data: bytes) -> bytes:
        """Return what goes on instead of ``data``. May raise :exc:`Cut`."""
        return data

    def passed(self, flow: Flow, nbytes: int, now: float) -> None:
        """As many bytes have gone on. May raise :exc:`Cut`."""
        self._passed[flow] = self._passed.get(flow, 0) + nbytes

    def _on_a_wire(self) -> Wire:
        if self._wire is None:
            raise RuntimeError("the fault is on no proxy: proxy.add(fault)")
        return self._wire

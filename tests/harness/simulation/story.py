"""What happened in one simulated run, line by line, in virtual time.

The whole of it is compared when a seed is replayed: nothing enters it that
differs from process to process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ("COUNTED", "Line", "Story")

COUNTED: Final = frozenset({"bytes", "fault", "call", "end"})
"""Kinds of lines that are events: a slice that was delivered, a fault, a call's
begin, a call's end. The other kinds are remarks."""


class Line(NamedTuple):
    """One line; ``node`` is where it happened, empty for the world itself."""

    at: float
    kind: str
    node: str
    text: str

    def __str__(self) -> str:
        return f"{self.at:12.6f}  {self.kind:<6} {self.node:<8} {self.text}"


class Story:
    """Lines in the order in which they happened."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.events = 0

    def add(self, at: float, kind: str, node: str, text: str) -> None:
        """Add a line."""
        self.events += kind in COUNTED
        self.lines.append(Line(at, kind, node, text))

    def text(self, *, with_bytes: bool = True) -> Iterator[str]:
        """Yield the lines as text, if wanted without those of single slices."""
        for line in self.lines:
            if with_bytes or line.kind != "bytes":
                yield str(line)

    def digest(self) -> str:
        """Return a short digest of every line: equal for equal runs."""
        whole = "\n".join(self.text()).encode()
        return hashlib.blake2b(whole, digest_size=8).hexdigest()

"""What is known of each entry, in one byte: a long run has many."""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterator
from typing import Final

__all__ = ("Mark", "Marks")


class Mark(enum.IntFlag):
    """What has happened to an entry; as many as fill a byte."""

    IN = 1
    DONE = 2
    DONE_AGAIN = 4
    MAY_REPEAT = 8
    LEAVING = 16
    """A worker was lost on its way out of the body that had it."""
    BY_AWAIT = 32
    """It was acknowledged by a plain await."""
    BY_BODY = 64
    """It was acknowledged by leaving a body."""


_NO_MARK: Final = Mark(0)


class Marks:
    """Marks of entries by id: the name of a producer, a dash, a number."""

    def __init__(self) -> None:
        self._of: collections.defaultdict[str, bytearray]
        self._of = collections.defaultdict(bytearray)

    def __getitem__(self, entry_id: str) -> Mark:
        producer, number = _parts(entry_id)
        marks = self._of.get(producer, b"")
        return Mark(marks[number] if number < len(marks) else 0)

    def add(self, entry_id: str, mark: Mark) -> None:
        """Mark an entry."""
        producer, number = _parts(entry_id)
        marks = self._of[producer]
        marks.extend(bytes(max(0, number + 1 - len(marks))))
        marks[number] |= mark

    def remove(self, entry_id: str, mark: Mark) -> None:
        """Unmark an entry."""
        if self[entry_id] & mark:
            producer, number = _parts(entry_id)
            self._of[producer][number] &= ~mark

    def having(self, all_of: Mark, none_of: Mark = _NO_MARK) -> Iterator[str]:
        """Yield the ids of entries that have the ones and not the others."""
        for producer, marks in self._of.items():
            for number, mark in enumerate(marks):
                if mark & all_of == all_of and not mark & none_of:
                    yield f"{producer}-{number}"


def _parts(entry_id: str) -> tuple[str, int]:
    producer, _, number = entry_id.rpartition("-")
    return producer, int(number)

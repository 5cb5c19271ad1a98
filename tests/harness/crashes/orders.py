"""What a fork server is told, and what its children tell: one line each."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

__all__ = ("AWAITS", "Order", "Report", "Role", "Word")

AWAITS: Final = ".awaits"
"""A consumer's plain awaits are made under its name and this."""

Role = Literal["producer", "consumer"]

Word = Literal[
    "pid",  # the child was forked
    "gone",  # a child has ended (number: its wait status)
    "begun",  # a producer begins to insert this entry
    "in",  # ... its insert has returned
    "wait",  # a consumer begins to select (number: 1 if a kill now may lose one)
    "got",  # ... it has this entry, verified (number: attempt)
    "leaving",  # ... and is about to leave its body, which acknowledges it
    "done",  # ... and its use was acknowledged
    "late",  # ... but the entry had been taken back before
    "wrong",  # ... but its bytes are not those of the entry
    "left",  # the server has gone, as far as it can tell (why)
]


class Order(msgspec.Struct, frozen=True):
    """Fork a child that does this until it is killed."""

    role: Role
    name: str
    url: str
    seed: int
    first: int = 0
    longest_use_s: float = 0.004
    """A consumer uses an entry for so long at most before it leaves its body."""
    options: dict[str, Any] = {}


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened in process ``pid``."""

    pid: int
    word: Word
    entry_id: str = ""
    number: int = 0
    why: str = ""

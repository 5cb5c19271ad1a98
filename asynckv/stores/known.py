"""What was heard, not long ago, of which keys a tier has.

Without I/O: whoever uses it says what time it is. To ask an object store takes a
request a key, and engines ask for the same keys again and again while they wait. That a
key is there is believed for a minute: by then somebody has fetched it, or nobody wants
it. That it is not, for a second, or for ``missing_s``: others write, too.

An answer counts only if nobody here has changed the key since it was asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

__all__ = ("KnownKeys",)

_THERE_S: Final = 60.0
_MISSING_S: Final = 1.0
_MAX_KEYS: Final = 65_536


class KnownKeys:
    """At most ``max_keys``; those heard of longest ago are forgotten first."""

    def __init__(
        self, max_keys: int = _MAX_KEYS, *, missing_s: float = _MISSING_S
    ) -> None:
        self._max_keys = max_keys
        self._missing_s = missing_s
        self._heard: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        self._asked: dict[str, object] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def is_there(self, key: str, now_s: float) -> bool | None:
        """Say if a key is there; ``None``: nobody knows."""
        is_there, until_s = self._heard.get(key, (False, 0.0))
        return is_there if now_s < until_s else None

    def ask(self, key: str) -> object:
        """A key is asked for. Returns what belongs to the answer."""
        self._asked[key] = question = object()
        return question

    def answer(
        self, key: str, question: object, left_s: float | None, now_s: float
    ) -> None:
        """So it was while it was asked; ``None``: there was no answer.

        It is there for ``left_s``, or, if that is not more than 0, it is missing.
        """
        if self._asked.get(key) is question:
            del self._asked[key]
            if left_s is not None:
                self._note(key, left_s, now_s)

    def begin_change(self, key: str) -> None:
        """A key is written or deleted: nobody knows what is there."""
        self._asked.pop(key, None)
        self._heard.pop(key, None)

    def changed(self, key: str, left_s: float, now_s: float) -> None:
        """It was written, or deleted; ``left_s`` as in :meth:`answer`."""
        self._asked.pop(key, None)
        self._note(key, left_s, now_s)

    def _note(self, key: str, left_s: float, now_s: float) -> None:
        is_there = left_s > 0
        lasts_s = min(_THERE_S, left_s) if is_there else self._missing_s
        self._heard[key] = is_there, now_s + lasts_s
        self._heard.move_to_end(key)
        if len(self._heard) > self._max_keys:
            self._heard.popitem(last=False)

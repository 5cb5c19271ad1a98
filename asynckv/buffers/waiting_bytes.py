"""What the requests of peers keep in memory beside the buffers, and its bound.

A query keeps its tokens, an insert or a put its names, tokens and small tensors,
from the moment it comes until it ends. Queries and inserts are counted apart: the
ones that wait for the others never keep them out.
"""

from __future__ import annotations

from typing import Final

from asynckv.errors import Overloaded

__all__ = ("REQUEST_NBYTES", "KeptBytes", "LinkBytes", "WaitingBytes")

REQUEST_NBYTES: Final = 2048
"""What a request costs beside what it says: as much as is tested for one."""

_SHARE: Final = 2
"""One link has at most this part of what all have: a half."""


class WaitingBytes:
    """Of all links of a server: so much for queries, and as much for inserts."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._queries = _Whole(max_bytes)
        self._inserts = _Whole(max_bytes)

    @property
    def used_bytes(self) -> int:
        """What requests keep now."""
        return self._queries.used_bytes + self._inserts.used_bytes

    @property
    def refused(self) -> int:
        """How many requests were one too many."""
        return self._queries.refused + self._inserts.refused

    def for_link(self) -> LinkBytes:
        """Return what the requests of one more link are charged to."""
        return LinkBytes(KeptBytes(self._queries), KeptBytes(self._inserts))


class _Whole:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.refused = 0


class LinkBytes:
    """Of one link."""

    def __init__(self, queries: KeptBytes, inserts: KeptBytes) -> None:
        self.queries = queries
        self.inserts = inserts


class KeptBytes:
    """What requests of one kind and link keep."""

    def __init__(self, whole: _Whole) -> None:
        self._whole = whole
        self._used_bytes = 0

    def fits(self, nbytes: int) -> bool:
        """May so many bytes more be kept?"""
        whole = self._whole
        return (
            self._used_bytes + nbytes <= whole.max_bytes // _SHARE
            and whole.used_bytes + nbytes <= whole.max_bytes
        )

    def take(self, nbytes: int) -> None:
        """Charge for a request; each is given back once.

        :raises Overloaded: it cannot be kept; nothing was charged
        """
        whole = self._whole
        if not self.fits(nbytes):
            whole.refused += 1
            raise Overloaded(
                f"the requests of this link keep {self._used_bytes} bytes at the "
                f"server and those of all links {whole.used_bytes}; with {nbytes} "
                f"more it would be over {whole.max_bytes // _SHARE} or "
                f"{whole.max_bytes}"
            )
        self._used_bytes += nbytes
        whole.used_bytes += nbytes

    def give(self, nbytes: int) -> None:
        """The request is over."""
        self._used_bytes -= nbytes
        self._whole.used_bytes -= nbytes

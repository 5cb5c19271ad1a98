"""Which item's tokens match a query: a prefix tree over key bytes.

A key is ``tokens[roi]`` as little-endian int64, so equal bytes are equal ids
and no float ever compares them. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, Generic, TypeVar

from asynckv.buffers.places import Frontier, Place, ascending, put, take
from asynckv.buffers.prefix_tree import TOKEN_NBYTES, Node, PrefixTree

__all__ = ("PrefixIndex",)

T = TypeVar("T")

# Measured on CPython 3.11, with its seq.
_PLACE_NBYTES: Final = 88


class PrefixIndex(Generic[T]):
    """Items by their tokens, found by a longer or a shorter list of tokens.

    A query matches an item when one of the two keys is a non-empty prefix of
    the other; the length of the shorter is what matches. ``seq`` says who was
    first: lower is earlier, and it need not grow from one :meth:`add` to the
    next.

    ``accept`` is asked about each candidate at most once, best first, until it
    agrees; it must not change the index. Keys and queries of a length that is
    not a multiple of 8 bytes are ``ValueError``.
    """

    def __init__(self) -> None:
        self._tree: PrefixTree[T] = PrefixTree()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """About how much memory the index takes, without the items."""
        return self._tree.nbytes + self._size * _PLACE_NBYTES

    def add(self, key: bytes, seq: int, item: T) -> Place[T]:
        """Add ``item``; the place is for taking it out again."""
        node = self._tree.node_for(key)
        place = Place(node, seq, item)
        self._size += 1
        put(place, node)
        return place

    def remove(self, place: Place[T]) -> None:
        """Take an item out, and free what only it needed.

        :raises ValueError: it was taken out before
        """
        node = place.node
        if node is None:
            raise ValueError("the item was taken out of the index before")
        place.node = None
        self._size -= 1
        take(place, node)
        if node.places is None:
            self._tree.tidy(node)

    def best(
        self,
        key: bytes,
        *,
        min_tokens: int = 1,
        exact: bool = False,
        accept: Callable[[T], bool] | None = None,
    ) -> tuple[T, int] | None:
        """Find the item of the longest match, the lowest seq among equals.

        Returns the item and how many tokens match: at least ``min_tokens``,
        and never none. ``exact`` asks for items of exactly this key.
        """
        above, depth, below = self._tree.walk(key)
        size = len(key)
        min_nbytes = min_tokens * TOKEN_NBYTES or TOKEN_NBYTES
        if size < min_nbytes:
            return None
        if below is not None:
            if exact:
                is_equal = depth + len(below.edge) == size
                return _first_accepted((is_equal and below.places) or (), size, accept)
            lowest = below.lowest
            if lowest is not None and (accept is None or accept(lowest.item)):
                return lowest.item, size // TOKEN_NBYTES
            found = _next_accepted(below, size, accept)
            if found is not None:
                return found
        while depth >= min_nbytes and not exact:
            found = _first_accepted(above.places or (), depth, accept)
            if found is not None:
                return found
            above, depth = _step_up(above, depth)
        return None

    def oldest(
        self, key: bytes, *, accept: Callable[[T, int], bool] | None = None
    ) -> tuple[T, int] | None:
        """Find the lowest seq among all that match, however long the match.

        Returns the item and how many tokens match; ``accept`` is given both.
        """
        above, depth, below = self._tree.walk(key)
        if not key:
            return None
        # The usual answer needs no heap, which ten thousand prefixes would fill.
        lowest, matched = (below.lowest if below else None), len(key)
        node, nbytes = above, depth
        while nbytes:
            places = node.places
            if places is not None and (lowest is None or places[0].seq < lowest.seq):
                lowest, matched = places[0], nbytes
            node, nbytes = _step_up(node, nbytes)
        if lowest is None:
            return None
        if accept is None or accept(lowest.item, matched // TOKEN_NBYTES):
            return lowest.item, matched // TOKEN_NBYTES
        frontier: Frontier[T] = Frontier()
        if below is not None:
            frontier.add_subtree(below, len(key))
        while depth:
            frontier.add_places(above, 0, depth)
            above, depth = _step_up(above, depth)
        for place, nbytes in frontier.ascending():
            tokens = nbytes // TOKEN_NBYTES
            if place is not lowest and accept(place.item, tokens):
                return place.item, tokens
        return None

    def first(self, *, accept: Callable[[T], bool] | None = None) -> T | None:
        """Find the lowest seq of all items, whatever their keys."""
        lowest = self._tree.root.lowest
        if lowest is not None and (accept is None or accept(lowest.item)):
            return lowest.item
        found = _next_accepted(self._tree.root, 0, accept)
        return None if found is None else found[0]


def _step_up(node: Node[T], depth: int) -> tuple[Node[T], int]:
    return node.parent or node, depth - len(node.edge)


def _first_accepted(
    places: Iterable[Place[T]], nbytes: int, accept: Callable[[T], bool] | None
) -> tuple[T, int] | None:
    for place in places:
        if accept is None or accept(place.item):
            return place.item, nbytes // TOKEN_NBYTES
    return None


def _next_accepted(
    node: Node[T], nbytes: int, accept: Callable[[T], bool] | None
) -> tuple[T, int] | None:
    """Find the lowest seq at and below ``node`` but the very lowest."""
    # The usual answer needs no heap: it is the lowest, which was asked before.
    return _first_accepted(islice(ascending(node), 1, None), nbytes, accept)

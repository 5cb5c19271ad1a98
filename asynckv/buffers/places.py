"""Items at the nodes of a prefix tree, in the order of their seq.

A subtree is searched from its lowest seq on, and no further than until an item
is good enough.
"""

from __future__ import annotations

import collections
import heapq
from bisect import bisect_left, insort_right
from collections.abc import Iterator
from itertools import count
from operator import attrgetter
from typing import Final, Generic, TypeVar

from asynckv.buffers.prefix_tree import Node

__all__ = ("Frontier", "Place", "ascending", "put", "take")

T = TypeVar("T")

_WHOLE_SUBTREE: Final = -1
_LIST_PLACES: Final = 64
"""Of more places the first is dear to take from a list, which is the smaller."""

_seq_of: Final = attrgetter("seq")


class Place(Generic[T]):
    """Where an item stands in an index; opaque but for ``item`` and ``seq``."""

    __slots__ = ("item", "node", "seq")

    def __init__(self, node: Node[T], seq: int, item: T) -> None:
        self.item: Final = item
        self.seq: Final = seq
        self.node: Node[T] | None = node


def put(place: Place[T], node: Node[T]) -> None:
    """Let a place be found at ``node``; goes up only as far as it is the lowest."""
    places = node.places
    if places is None:
        node.places = [place]
    elif places[-1].seq < place.seq:
        places.append(place)
    else:
        insort_right(places, place, key=_seq_of)
    if places is not None and len(places) == _LIST_PLACES:
        node.places = collections.deque(places)
    above: Node[T] | None = node
    while above is not None and (above.lowest is None or place.seq < above.lowest.seq):
        above.lowest = place
        above = above.parent


def take(place: Place[T], node: Node[T]) -> None:
    """Take a place from ``node``; goes up only as far as it was the lowest."""
    places = node.places or []
    if places[0] is place:
        del places[0]
    else:
        del places[places.index(place, bisect_left(places, place.seq, key=_seq_of))]
    if not places:
        node.places = None
    above: Node[T] | None = node
    while above is not None and above.lowest is place:
        above.lowest = above.find_lowest()
        above = above.parent


class Frontier(Generic[T]):
    """Places in order of seq, out of whole subtrees and single nodes.

    A subtree is opened only when its lowest place was not good enough, so the
    first place costs nothing.
    """

    __slots__ = ("_heap", "_ties")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Place[T], Node[T], int, int]] = []
        self._ties = count()

    def add_subtree(self, node: Node[T], nbytes: int) -> None:
        """Offer what is at and below ``node``, as matching ``nbytes``."""
        if node.lowest is not None:
            self._push(node.lowest, node, _WHOLE_SUBTREE, nbytes)

    def add_places(self, node: Node[T], index: int, nbytes: int) -> None:
        """Offer the places of ``node`` alone, from ``index`` on."""
        if node.places is not None and index < len(node.places):
            self._push(node.places[index], node, index, nbytes)

    def ascending(self) -> Iterator[tuple[Place[T], int]]:
        """Yield each place and the bytes that it matches, lowest seq first."""
        while self._heap:
            _, _, place, node, index, nbytes = heapq.heappop(self._heap)
            yield place, nbytes
            if index == _WHOLE_SUBTREE:
                self._open(node, place, nbytes)
            else:
                self.add_places(node, index + 1, nbytes)

    def _push(self, place: Place[T], node: Node[T], index: int, nbytes: int) -> None:
        heapq.heappush(
            self._heap, (place.seq, next(self._ties), place, node, index, nbytes)
        )

    def _open(self, top: Node[T], lowest: Place[T], nbytes: int) -> None:
        """Offer everything in the subtree of ``top`` but its ``lowest``."""
        node: Node[T] | None = top
        while node is not None:
            is_here = node is lowest.node
            self.add_places(node, 1 if is_here else 0, nbytes)
            on_the_way: Node[T] | None = None
            for child in (node.children or {}).values():
                if child.lowest is lowest:
                    on_the_way = child
                else:
                    self.add_subtree(child, nbytes)
            node = on_the_way


def ascending(node: Node[T]) -> Iterator[Place[T]]:
    """Yield the places at and below ``node``, lowest seq first."""
    frontier: Frontier[T] = Frontier()
    frontier.add_subtree(node, 0)
    for place, _ in frontier.ascending():
        yield place

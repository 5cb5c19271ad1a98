"""Which item's tokens match a query: a compressed radix tree over key bytes.

A key is ``tokens[roi]`` as little-endian int64, so equal bytes are equal ids and no
float ever compares them. Items lie at the tree's nodes in the order of their seq; a
subtree is searched from its lowest seq on, and no further than until an item is good
enough. Nothing here waits, and nothing recurses: one key may extend another ten
thousand times over.
"""

from __future__ import annotations

import collections
import heapq
from bisect import bisect_left, insort_right
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from operator import attrgetter
from typing import Final, Generic, TypeVar

from asynckv.transfers.tokens import TOKEN_NBYTES

__all__ = (
    "Frontier",
    "Node",
    "Place",
    "PrefixIndex",
    "PrefixTree",
    "ascending",
    "put",
    "take",
)


T = TypeVar("T")


class Node(Generic[T]):
    """The end of an edge.

    Edges branch between any two bytes: a match is decided by whole keys, which
    hold whole tokens, and a node never has more than 256 children. Every node
    but the root has a place or at least two children.
    """

    __slots__ = ("children", "edge", "lowest", "parent", "places")

    def __init__(self, parent: Node[T] | None, edge: bytes) -> None:
        self.parent = parent
        self.edge = edge
        if parent is not None:
            parent.adopt(self)
        self.children: dict[int, Node[T]] | None = None
        self.places: list[Place[T]] | collections.deque[Place[T]] | None = None
        """Places of exactly this key, lowest seq first; never empty."""
        self.lowest: Place[T] | None = None
        """The place of lowest seq in the whole subtree."""

    def find_lowest(self) -> Place[T] | None:
        """Work ``lowest`` out again from this node and its children."""
        lowest = self.places[0] if self.places else None
        if self.children:
            for child in self.children.values():
                other = child.lowest
                if other is not None and (lowest is None or other.seq < lowest.seq):
                    lowest = other
        return lowest

    def adopt(self, child: Node[T]) -> None:
        """Make ``child`` the one that its edge's first byte leads to."""
        if self.children is None:
            self.children = {}
        self.children[child.edge[0]] = child
        child.parent = self


class PrefixTree(Generic[T]):
    """Nodes by their keys. A key that is no whole tokens is ``ValueError``."""

    def __init__(self) -> None:
        self.root: Node[T] = Node(None, b"")

    def walk(self, key: bytes) -> tuple[Node[T], int, Node[T] | None]:
        """Follow ``key`` to its end, or to where it leaves the tree.

        Returns the deepest node whose key is a proper prefix of ``key``, the
        length of that in bytes, and the node at the end of the edge that ``key``
        ends in or at, if there is one: its whole subtree extends ``key``.
        """
        size = len(key)
        if size % TOKEN_NBYTES:
            raise ValueError(f"a key of {size} bytes is not made of whole tokens")
        node, at = self.root, 0
        if not size:
            return node, 0, node
        while True:
            child = node.children.get(key[at]) if node.children else None
            if child is None:
                return node, at, None
            edge = child.edge
            end = at + len(edge)
            if end >= size:
                return node, at, child if edge.startswith(key[at:]) else None
            if not key.startswith(edge, at):
                return node, at, None
            node, at = child, end

    def node_for(self, key: bytes) -> Node[T]:
        """Return the node of exactly this key, made if it is missing."""
        above, depth, node = self.walk(key)
        if node is None:
            rest = key[depth:]
            node = above.children.get(rest[0]) if above.children else None
            if node is not None:
                above = self._split(node, _common_nbytes(node.edge, rest))
                rest = rest[len(above.edge) :]
            return Node(above, rest)
        nbytes = len(key) - depth
        return self._split(node, nbytes) if nbytes < len(node.edge) else node

    def tidy(self, node: Node[T]) -> None:
        """Drop ``node`` if nothing needs it, then its parent likewise."""
        while node.parent is not None and node.places is None:
            parent = node.parent
            if node.children is None:
                _disown(parent, node)
            elif len(node.children) == 1:
                (child,) = node.children.values()
                child.edge = node.edge + child.edge
                parent.adopt(child)
            else:
                return
            node.parent = node.children = None
            node = parent

    def _split(self, node: Node[T], nbytes: int) -> Node[T]:
        """Put a node into the edge to ``node``, ``nbytes`` down, and return it."""
        upper = Node(node.parent, node.edge[:nbytes])
        upper.lowest = node.lowest
        node.edge = node.edge[nbytes:]
        upper.adopt(node)
        return upper


def _disown(parent: Node[T], child: Node[T]) -> None:
    siblings = parent.children or {}
    del siblings[child.edge[0]]
    parent.children = siblings or None


def _common_nbytes(left: bytes, right: bytes) -> int:
    """Count the bytes that both begin with, comparing slices by halves."""
    same, limit = 0, min(len(left), len(right))
    while same < limit:
        middle = (same + limit + 1) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            limit = middle - 1
    return same


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
        self.tree: PrefixTree[T] = PrefixTree()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, key: bytes, seq: int, item: T) -> Place[T]:
        """Add ``item``; the place is for taking it out again."""
        node = self.tree.node_for(key)
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
            self.tree.tidy(node)

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
        above, depth, below = self.tree.walk(key)
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
        above, depth, below = self.tree.walk(key)
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
        lowest = self.tree.root.lowest
        if lowest is not None and (accept is None or accept(lowest.item)):
            return lowest.item
        found = _next_accepted(self.tree.root, 0, accept)
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

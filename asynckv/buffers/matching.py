"""Which item's tokens match a query: a compressed radix tree over key bytes.

A key is ``tokens[roi]`` as little-endian int64, so equal bytes are equal ids
and no float ever compares them. Nothing here waits, and nothing recurses: one
item may extend another ten thousand times over.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort_right
from collections.abc import Callable, Iterator
from itertools import count, islice
from operator import attrgetter
from typing import Final, Generic, TypeVar

__all__ = ("Place", "PrefixIndex")

T = TypeVar("T")

_TOKEN_NBYTES: Final = 8
# Measured on CPython 3.11: a node with its edge's header, list and share of
# its parent's dict; a place with its seq.
_NODE_NBYTES: Final = 290
_PLACE_NBYTES: Final = 96
_WHOLE_SUBTREE: Final = -1

_seq_of: Final = attrgetter("seq")


class Place(Generic[T]):
    """Where an item stands in the index; opaque but for these attributes."""

    __slots__ = ("_hidden", "_node", "item", "seq")

    def __init__(self, node: _Node[T], seq: int, item: T) -> None:
        self.item: Final = item
        self.seq: Final = seq
        self._node: _Node[T] | None = node
        self._hidden = True

    @property
    def is_hidden(self) -> bool:
        """Whether queries pass it over; so they do once it was removed."""
        return self._hidden


class _Node(Generic[T]):
    """The end of an edge.

    Edges branch between any two bytes: a match is decided by whole keys, which
    hold whole tokens, and a node never has more than 256 children. Every node
    but the root has a place or at least two children.
    """

    __slots__ = ("children", "edge", "hidden", "lowest", "parent", "shown")

    def __init__(self, parent: _Node[T] | None, edge: bytes) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[int, _Node[T]] | None = None
        self.shown: list[Place[T]] | None = None
        """Visible places of exactly this key, lowest seq first; never empty."""
        self.hidden = 0
        """How many places of exactly this key are hidden."""
        self.lowest: Place[T] | None = None
        """The visible place of lowest seq in the whole subtree."""

    def find_lowest(self) -> Place[T] | None:
        """Work ``lowest`` out again from this node and its children."""
        lowest = self.shown[0] if self.shown else None
        if self.children:
            for child in self.children.values():
                other = child.lowest
                if other is not None and (lowest is None or other.seq < lowest.seq):
                    lowest = other
        return lowest

    def adopt(self, child: _Node[T]) -> None:
        """Make ``child`` the one that its edge's first byte leads to."""
        if self.children is None:
            self.children = {}
        self.children[child.edge[0]] = child
        child.parent = self

    def disown(self, child: _Node[T]) -> None:
        """Forget ``child``."""
        if self.children is not None:
            del self.children[child.edge[0]]
            self.children = self.children or None


class PrefixIndex(Generic[T]):
    """Items by their tokens, found by a longer or a shorter list of tokens.

    A query matches an item when one of the two keys is a non-empty prefix of
    the other; the length of the shorter is what matches. ``seq`` says who was
    first: lower is earlier, and it need not grow from one :meth:`add` to the
    next. Hidden items keep their place and are not found.

    ``accept`` is asked about each candidate at most once, best first, until it
    agrees; it must not change the index. Keys and queries of a length that is
    not a multiple of 8 bytes are ``ValueError``.
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node(None, b"")
        self._edges_nbytes = 0
        self._nodes = 0
        self._places = 0

    def __len__(self) -> int:
        """How many items there are, hidden ones included."""
        return self._places

    @property
    def nbytes(self) -> int:
        """About how much memory the index takes, without the items."""
        overhead = self._nodes * _NODE_NBYTES + self._places * _PLACE_NBYTES
        return self._edges_nbytes + overhead

    def add(self, key: bytes, seq: int, item: T) -> Place[T]:
        """Add a visible ``item``; the place is for taking it out again."""
        place = Place(self._node_for(key), seq, item)
        self._places += 1
        _show(place)
        return place

    def remove(self, place: Place[T]) -> None:
        """Take an item out, hidden or not, and free what only it needed.

        :raises ValueError: it was taken out before
        """
        node = _node_of(place)
        if place._hidden:
            node.hidden -= 1
        else:
            _unshow(place, node)
        place._node = None
        place._hidden = True
        self._places -= 1
        self._tidy(node)

    def hide(self, place: Place[T]) -> None:
        """Let no query find the item until :meth:`show`; twice is once.

        :raises ValueError: it was taken out before
        """
        node = _node_of(place)
        if not place._hidden:
            _unshow(place, node)
            place._hidden = True
            node.hidden += 1

    def show(self, place: Place[T]) -> None:
        """Let queries find the item again, in its old place; twice is once.

        :raises ValueError: it was taken out before
        """
        node = _node_of(place)
        if place._hidden:
            node.hidden -= 1
            _show(place)

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
        min_nbytes = max(min_tokens, 1) * _TOKEN_NBYTES
        above, depth, below = self._walk(key)
        if len(key) < min_nbytes:
            return None
        if below is not None and exact:
            is_equal = depth + len(below.edge) == len(key)
            places = iter((is_equal and below.shown) or ())
            return _first_accepted(places, len(key), accept)
        if below is not None:
            found = _lowest_accepted(below, len(key), accept)
            if found is not None:
                return found
        while depth >= min_nbytes and not exact:
            found = _first_accepted(iter(above.shown or ()), depth, accept)
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
        above, depth, below = self._walk(key)
        if not key:
            return None
        # The usual answer needs no heap, which ten thousand prefixes would fill.
        lowest, matched = (below.lowest if below else None), len(key)
        node, nbytes = above, depth
        while nbytes:
            shown = node.shown
            if shown is not None and (lowest is None or shown[0].seq < lowest.seq):
                lowest, matched = shown[0], nbytes
            node, nbytes = _step_up(node, nbytes)
        if lowest is None:
            return None
        if accept is None or accept(lowest.item, matched // _TOKEN_NBYTES):
            return lowest.item, matched // _TOKEN_NBYTES
        frontier: _Frontier[T] = _Frontier()
        if below is not None:
            frontier.add_subtree(below, len(key))
        while depth:
            frontier.add_shown(above, 0, depth)
            above, depth = _step_up(above, depth)
        for place, nbytes in frontier.ascending():
            tokens = nbytes // _TOKEN_NBYTES
            if place is not lowest and accept(place.item, tokens):
                return place.item, tokens
        return None

    def first(self, *, accept: Callable[[T], bool] | None = None) -> T | None:
        """Find the lowest seq of all visible items, whatever their keys."""
        found = _lowest_accepted(self._root, 0, accept)
        return None if found is None else found[0]

    def _walk(self, key: bytes) -> tuple[_Node[T], int, _Node[T] | None]:
        """Follow ``key`` to its end, or to where it leaves the tree.

        Returns the deepest node whose key is a proper prefix of ``key``, the
        length of that in bytes, and the node at the end of the edge that ``key``
        ends in or at, if there is one: its whole subtree extends ``key``.
        """
        size = len(key)
        if size % _TOKEN_NBYTES:
            raise ValueError(f"a key of {size} bytes is not made of whole tokens")
        node, at = self._root, 0
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

    def _node_for(self, key: bytes) -> _Node[T]:
        """Return the node of exactly this key, made if it is missing."""
        above, depth, node = self._walk(key)
        if node is None:
            rest = key[depth:]
            node = above.children.get(rest[0]) if above.children else None
            if node is not None:
                above = self._split(node, _common_nbytes(node.edge, rest))
                rest = rest[len(above.edge) :]
            return self._make_node(above, rest)
        nbytes = len(key) - depth
        return self._split(node, nbytes) if nbytes < len(node.edge) else node

    def _make_node(self, parent: _Node[T], edge: bytes) -> _Node[T]:
        node = _Node(parent, edge)
        parent.adopt(node)
        self._nodes += 1
        self._edges_nbytes += len(edge)
        return node

    def _split(self, node: _Node[T], nbytes: int) -> _Node[T]:
        """Put a node into the edge to ``node``, ``nbytes`` down, and return it."""
        parent = _parent_of(node)
        upper = self._make_node(parent, node.edge[:nbytes])
        upper.lowest = node.lowest
        node.edge = node.edge[nbytes:]
        self._edges_nbytes -= nbytes
        upper.adopt(node)
        return upper

    def _tidy(self, node: _Node[T]) -> None:
        """Drop ``node`` if nothing needs it, then its parent likewise."""
        while node is not self._root and not node.shown and not node.hidden:
            parent = _parent_of(node)
            if node.children is None:
                self._edges_nbytes -= len(node.edge)
                parent.disown(node)
            elif len(node.children) == 1:
                (child,) = node.children.values()
                child.edge = node.edge + child.edge
                parent.adopt(child)
            else:
                return
            node.parent = node.children = None
            self._nodes -= 1
            node = parent


class _Frontier(Generic[T]):
    """Places in order of seq, out of whole subtrees and single nodes.

    A subtree is opened only when its lowest place was not good enough, so the
    first place costs nothing.
    """

    __slots__ = ("_heap", "_ties")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Node[T], int, int]] = []
        self._ties = count()

    def add_subtree(self, node: _Node[T], nbytes: int) -> None:
        """Offer what is at and below ``node``, as matching ``nbytes``."""
        if node.lowest is not None:
            entry = (node.lowest.seq, next(self._ties), node, _WHOLE_SUBTREE, nbytes)
            heapq.heappush(self._heap, entry)

    def add_shown(self, node: _Node[T], index: int, nbytes: int) -> None:
        """Offer the places of ``node`` alone, from ``index`` on."""
        if node.shown is not None and index < len(node.shown):
            entry = (node.shown[index].seq, next(self._ties), node, index, nbytes)
            heapq.heappush(self._heap, entry)

    def ascending(self) -> Iterator[tuple[Place[T], int]]:
        """Yield each place and the bytes that it matches, lowest seq first."""
        while self._heap:
            _, _, node, index, nbytes = heapq.heappop(self._heap)
            if index != _WHOLE_SUBTREE and node.shown is not None:
                yield node.shown[index], nbytes
                self.add_shown(node, index + 1, nbytes)
            elif node.lowest is not None:
                yield node.lowest, nbytes
                self._open(node, node.lowest, nbytes)

    def _open(self, top: _Node[T], lowest: Place[T], nbytes: int) -> None:
        """Offer everything in the subtree of ``top`` but its ``lowest``."""
        node: _Node[T] | None = top
        while node is not None:
            is_here = node is lowest._node
            self.add_shown(node, 1 if is_here else 0, nbytes)
            on_the_way: _Node[T] | None = None
            for child in (node.children or {}).values():
                if child.lowest is lowest:
                    on_the_way = child
                else:
                    self.add_subtree(child, nbytes)
            node = on_the_way


def _ascending(node: _Node[T]) -> Iterator[Place[T]]:
    """Yield the visible places at and below ``node``, lowest seq first."""
    frontier: _Frontier[T] = _Frontier()
    frontier.add_subtree(node, 0)
    for place, _ in frontier.ascending():
        yield place


def _first_accepted(
    places: Iterator[Place[T]], nbytes: int, accept: Callable[[T], bool] | None
) -> tuple[T, int] | None:
    for place in places:
        if accept is None or accept(place.item):
            return place.item, nbytes // _TOKEN_NBYTES
    return None


def _lowest_accepted(
    node: _Node[T], nbytes: int, accept: Callable[[T], bool] | None
) -> tuple[T, int] | None:
    """Find the lowest seq at and below ``node``."""
    lowest = node.lowest
    if lowest is None:
        return None
    # The usual answer needs no heap.
    if accept is None or accept(lowest.item):
        return lowest.item, nbytes // _TOKEN_NBYTES
    return _first_accepted(islice(_ascending(node), 1, None), nbytes, accept)


def _node_of(place: Place[T]) -> _Node[T]:
    if place._node is None:
        raise ValueError("the item was taken out of the index before")
    return place._node


def _parent_of(node: _Node[T]) -> _Node[T]:
    if node.parent is None:
        raise ValueError("the root has no parent")
    return node.parent


def _step_up(node: _Node[T], depth: int) -> tuple[_Node[T], int]:
    return _parent_of(node), depth - len(node.edge)


def _show(place: Place[T]) -> None:
    """Make a place findable; goes up only as far as it is the lowest."""
    node = place._node
    if node is None:
        return
    place._hidden = False
    if node.shown is None:
        node.shown = [place]
    else:
        insort_right(node.shown, place, key=_seq_of)
    above: _Node[T] | None = node
    while above is not None and (above.lowest is None or place.seq < above.lowest.seq):
        above.lowest = place
        above = above.parent


def _unshow(place: Place[T], node: _Node[T]) -> None:
    """Make a place unfindable; goes up only as far as it was the lowest."""
    shown = node.shown or []
    if shown[0] is place:
        del shown[0]
    else:
        del shown[shown.index(place, bisect_left(shown, place.seq, key=_seq_of))]
    if not shown:
        node.shown = None
    above: _Node[T] | None = node
    while above is not None and above.lowest is place:
        above.lowest = above.find_lowest()
        above = above.parent


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

"""A compressed radix tree over key bytes: its nodes, and how it grows and shrinks.

Nothing here recurses: one key may extend another ten thousand times over.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from asynckv.buffers.places import Place

__all__ = ("TOKEN_NBYTES", "Node", "PrefixTree")

T = TypeVar("T")

TOKEN_NBYTES: Final = 8
# Measured on CPython 3.11: a node with its edge's header, list and share of
# its parent's dict.
_NODE_NBYTES: Final = 282


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
        self._edges_nbytes = 0
        self._nodes = 0

    @property
    def nbytes(self) -> int:
        """About how much memory the nodes take."""
        return self._edges_nbytes + self._nodes * _NODE_NBYTES

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
            return self._make_node(above, rest)
        nbytes = len(key) - depth
        return self._split(node, nbytes) if nbytes < len(node.edge) else node

    def tidy(self, node: Node[T]) -> None:
        """Drop ``node`` if nothing needs it, then its parent likewise."""
        while node.parent is not None and node.places is None:
            parent = node.parent
            if node.children is None:
                self._edges_nbytes -= len(node.edge)
                _disown(parent, node)
            elif len(node.children) == 1:
                (child,) = node.children.values()
                child.edge = node.edge + child.edge
                parent.adopt(child)
            else:
                return
            node.parent = node.children = None
            self._nodes -= 1
            node = parent

    def _make_node(self, parent: Node[T], edge: bytes) -> Node[T]:
        node = Node(parent, edge)
        parent.adopt(node)
        self._nodes += 1
        self._edges_nbytes += len(edge)
        return node

    def _split(self, node: Node[T], nbytes: int) -> Node[T]:
        """Put a node into the edge to ``node``, ``nbytes`` down, and return it."""
        above = node.parent or self.root
        upper = self._make_node(above, node.edge[:nbytes])
        upper.lowest = node.lowest
        node.edge = node.edge[nbytes:]
        self._edges_nbytes -= nbytes
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

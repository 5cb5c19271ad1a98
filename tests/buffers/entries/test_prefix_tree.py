from __future__ import annotations

import pytest

from asynckv.buffers.entries.prefix_index import Node, PrefixTree

ONE, TWO, THREE = (bytes([n]) * 8 for n in (1, 2, 3))


def key_of(node: Node[int]) -> bytes:
    """Return the edges from the root to ``node``, joined."""
    return b"" if node.parent is None else key_of(node.parent) + node.edge


def test_a_key_leads_to_its_own_node() -> None:
    tree: PrefixTree[int] = PrefixTree()
    for key in (ONE + TWO, ONE + THREE, ONE, b"", TWO):
        node = tree.node_for(key)
        assert key_of(node) == key
        assert tree.node_for(key) is node


def test_a_walk_ends_where_the_key_does_or_leaves_the_tree() -> None:
    tree: PrefixTree[int] = PrefixTree()
    long = tree.node_for(ONE + TWO)
    assert tree.walk(ONE) == (tree.root, 0, long)
    assert tree.walk(ONE + TWO + THREE) == (long, 16, None)
    assert tree.walk(ONE + THREE) == (tree.root, 0, None)
    assert tree.walk(TWO) == (tree.root, 0, None)
    assert tree.walk(b"") == (tree.root, 0, tree.root)


def test_an_edge_parts_between_two_bytes_of_a_token() -> None:
    tree: PrefixTree[int] = PrefixTree()
    first, second = b"\1\2\3\4\0\0\0\0", b"\1\2\3\5\0\0\0\0"
    above = tree.node_for(first).parent
    tree.node_for(second)
    parting = tree.node_for(first).parent
    assert above is tree.root
    assert parting is not None and parting.edge == b"\1\2\3"


def test_nodes_that_nothing_needs_are_dropped() -> None:
    tree: PrefixTree[int] = PrefixTree()
    nodes = [tree.node_for(key) for key in (ONE + TWO, ONE + THREE)]
    for node in nodes:
        tree.tidy(node)
    assert tree.root.children is None


def test_a_key_of_broken_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="whole tokens"):
        PrefixTree[int]().walk(b"seven b")

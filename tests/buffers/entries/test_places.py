from __future__ import annotations

import random

from asynckv.buffers.entries.prefix_index import (
    Frontier,
    Node,
    Place,
    PrefixTree,
    ascending,
    put,
    take,
)

ONE, TWO = (bytes([n]) * 8 for n in (1, 2))


def placed(tree: PrefixTree[str], key: bytes, *seqs: int) -> Node[str]:
    node = tree.node_for(key)
    for seq in seqs:
        put(Place(node, seq, f"{seq}"), node)
    return node


def test_the_lowest_is_known_all_the_way_up() -> None:
    tree: PrefixTree[str] = PrefixTree()
    for key, seq in ((ONE + TWO, 2), (ONE, 3), (TWO, 1)):
        placed(tree, key, seq)
    one = tree.node_for(ONE)
    lowest = [node.lowest and node.lowest.seq for node in (tree.root, one)]
    assert lowest == [1, 2]


def test_taking_the_lowest_leaves_the_next() -> None:
    tree: PrefixTree[str] = PrefixTree()
    node = placed(tree, ONE, 3, 1, 2)
    for expected in (2, 3, None):
        assert tree.root.lowest is not None
        take(tree.root.lowest, node)
        assert (tree.root.lowest and tree.root.lowest.seq) == expected
    assert node.places is None


def test_of_many_places_any_is_taken_in_any_order() -> None:
    tree: PrefixTree[str] = PrefixTree()
    seqs = random.Random(1).sample(range(1000), 300)
    node = placed(tree, ONE, *seqs)
    places = {place.seq: place for place in ascending(node)}
    assert list(places) == sorted(seqs)
    for seq in seqs[:-1]:
        take(places.pop(seq), node)
        assert tree.root.lowest is places[min(places)]
    assert [*ascending(tree.root)] == [*places.values()]


def test_places_come_in_the_order_of_their_seq() -> None:
    tree: PrefixTree[str] = PrefixTree()
    for key, seqs in ((ONE, (5, 1)), (ONE + TWO, (4, 2)), (TWO, (3,)), (b"", (0,))):
        placed(tree, key, *seqs)
    assert [place.seq for place in ascending(tree.root)] == [0, 1, 2, 3, 4, 5]
    assert [place.seq for place in ascending(tree.node_for(ONE))] == [1, 2, 4, 5]
    assert list(ascending(PrefixTree[str]().root)) == []


def test_single_nodes_and_subtrees_are_merged_with_what_each_matches() -> None:
    tree: PrefixTree[str] = PrefixTree()
    above, below = placed(tree, ONE, 3, 1), placed(tree, ONE + TWO, 2)
    frontier: Frontier[str] = Frontier()
    frontier.add_places(above, 0, 8)
    frontier.add_places(tree.root, 0, 0)
    frontier.add_subtree(below, 16)
    found = [(place.seq, nbytes) for place, nbytes in frontier.ascending()]
    assert found == [(1, 8), (2, 16), (3, 8)]

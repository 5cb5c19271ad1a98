"""Keys and the items that begin as they do."""

from __future__ import annotations

import gc
import random
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from asynckv.buffers.entries.prefix_index import (
    Frontier,
    Node,
    Place,
    PrefixIndex,
    PrefixTree,
    ascending,
    put,
    take,
)

# Ids that share their low bytes: an edge may branch inside a token.
ALPHABET = (0, 1, 256, 1 << 40)

token_lists = st.lists(st.sampled_from(ALPHABET), max_size=6).map(tuple)

seqs = st.integers(min_value=-(2**62), max_value=2**62)

refusals = st.none() | st.sets(st.integers(min_value=0, max_value=60))


def key_of(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}q", *tokens)


class Model:
    """One stored item, as the brute force keeps it."""

    def __init__(self, tokens: tuple[int, ...], seq: int, number: int) -> None:
        self.tokens, self.seq, self.number = tokens, seq, number

    def matched(self, query: tuple[int, ...]) -> int:
        shared = min(len(query), len(self.tokens))
        return shared if query[:shared] == self.tokens[:shared] else 0


def edges_of(index: PrefixIndex[Any]) -> list[bytes]:
    """Return what the tree keeps of keys: nothing may be left of what was taken out."""
    edges, nodes = list[bytes](), [*(index.tree.root.children or {}).values()]
    while nodes:
        node = nodes.pop()
        edges.append(node.edge)
        nodes += (node.children or {}).values()
    return edges


class IndexAgainstBruteForce(RuleBasedStateMachine):
    """Every answer of the index is that of a scan over all items."""

    places: Bundle[Place[Model]] = Bundle("places")

    def __init__(self) -> None:
        super().__init__()
        self.index: PrefixIndex[Model] = PrefixIndex()
        self.models: list[Model] = []
        self.added = 0

    @rule(target=places, tokens=token_lists, seq=seqs)
    def add(self, tokens: tuple[int, ...], seq: int) -> Place[Model]:
        return self.put(tokens, seq)

    def put(self, tokens: tuple[int, ...], seq: int) -> Place[Model]:
        # Distinct and unordered seqs: what is given back comes with an old one.
        model = Model(tokens, seq * 1_000 + self.added, self.added)
        self.added += 1
        self.models.append(model)
        return self.index.add(key_of(tokens), model.seq, model)

    @rule(target=places, tokens=token_lists, shorter=st.integers(0, 6), seq=seqs)
    def add_two_that_share(
        self, tokens: tuple[int, ...], shorter: int, seq: int
    ) -> MultipleResults[Place[Model]]:
        return multiple(self.put(tokens, seq), self.put(tokens[:shorter], -seq))

    @rule(place=consumes(places))
    def remove(self, place: Place[Model]) -> None:
        self.models.remove(place.item)
        self.index.remove(place)

    @rule(
        query=token_lists,
        min_tokens=st.integers(0, 5),
        exact=st.booleans(),
        refused=refusals,
    )
    def best(
        self,
        query: tuple[int, ...],
        min_tokens: int,
        exact: bool,
        refused: set[int] | None,
    ) -> None:
        found = [
            (-model.matched(query), model.seq, model)
            for model in self.models
            if self.may_be(model, refused)
            and model.matched(query) >= max(min_tokens, 1)
            and (not exact or model.tokens == query)
        ]
        expected = (min(found)[2], -min(found)[0]) if found else None
        accept = None if refused is None else self.refusing(refused)
        answer = self.index.best(
            key_of(query), min_tokens=min_tokens, exact=exact, accept=accept
        )
        assert answer == expected

    @rule(query=token_lists, refused=refusals, min_tokens=st.integers(0, 5))
    def oldest(
        self, query: tuple[int, ...], refused: set[int] | None, min_tokens: int
    ) -> None:
        found = [
            (model.seq, model)
            for model in self.models
            if self.may_be(model, refused)
            and model.matched(query) >= max(min_tokens, 1)
        ]
        oldest = min(found)[1] if found else None
        expected = None if oldest is None else (oldest, oldest.matched(query))
        agrees = self.refusing(refused or set())
        answer = self.index.oldest(
            key_of(query),
            accept=lambda model, tokens: tokens >= min_tokens and agrees(model),
        )
        assert answer == expected

    @rule(refused=refusals)
    def first(self, refused: set[int] | None) -> None:
        found = [model for model in self.models if self.may_be(model, refused)]
        expected = min(found, key=lambda model: model.seq, default=None)
        accept = None if refused is None else self.refusing(refused)
        assert self.index.first(accept=accept) is expected

    @invariant()
    def counts_every_item(self) -> None:
        assert len(self.index) == len(self.models)

    @invariant()
    def is_empty_again_without_items(self) -> None:
        if not self.models:
            assert edges_of(self.index) == []

    def may_be(self, model: Model, refused: set[int] | None) -> bool:
        return model.number not in (refused or ())

    def refusing(self, refused: set[int]) -> Callable[[Model], bool]:
        asked: set[int] = set()

        def accept(model: Model) -> bool:
            assert model.number not in asked, "asked twice"
            asked.add(model.number)
            return model.number not in refused

        return accept


IndexAgainstBruteForce.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None
)

TestIndexAgainstBruteForce = IndexAgainstBruteForce.TestCase

# Three times the recursion limit; benchmarks/matching.py measures 10,000.
CHAIN = 1_500  # a recursion would end at a thousand


class Named:
    """An item that can be watched going away."""


def chain_key(number: int) -> bytes:
    """The key of the ``number``-th entry, each two tokens longer than the last."""
    return bytes(16 * (number + 1))


def chain_orders() -> list[list[int]]:
    numbers = list(range(CHAIN))
    return [numbers, numbers[::-1], random.Random(2).sample(numbers, CHAIN)]


@pytest.fixture
def index() -> PrefixIndex[Any]:
    return PrefixIndex()


@pytest.mark.parametrize("order", chain_orders(), ids=["up", "down", "any"])
def test_a_chain_of_prefixes_deeper_than_the_stack_goes_in_and_out_in_any_order(
    index: PrefixIndex[int],
    order: list[int],
) -> None:
    places = [index.add(chain_key(number), CHAIN - number, number) for number in order]
    assert index.best(chain_key(CHAIN)) == (CHAIN - 1, 2 * CHAIN)
    assert index.best(bytes(8)) == index.oldest(bytes(8)) == (CHAIN - 1, 1)
    for place in places[: CHAIN // 2]:
        index.remove(place)
    left = order[CHAIN // 2 :]
    assert index.oldest(chain_key(CHAIN)) == (max(left), 2 * (max(left) + 1))
    for place in places[CHAIN // 2 :]:
        index.remove(place)
    assert edges_of(index) == []


def test_a_chain_answers_when_every_candidate_is_refused(
    index: PrefixIndex[int],
) -> None:
    for number in range(CHAIN):
        index.add(chain_key(number), CHAIN - number, number)
    asked: list[int] = []

    def refuse(number: int, matched_tokens: int) -> bool:
        asked.append(number)
        return matched_tokens > 1

    assert index.oldest(bytes(8), accept=refuse) is None
    assert asked == list(reversed(range(CHAIN)))


def test_ids_that_round_to_the_same_float_are_different(
    index: PrefixIndex[str],
) -> None:
    index.add(key_of((128_000, 2**62)), 1, "entry")
    assert index.best(key_of((128_001,))) is None
    assert index.best(key_of((128_000, 2**62 + 1))) is None
    assert index.best(key_of((128_000,))) == ("entry", 1)


def test_negative_ids_and_the_largest_are_ids_like_others(
    index: PrefixIndex[str],
) -> None:
    index.add(key_of((-1, 2**63 - 1)), 1, "entry")
    assert index.best(key_of((-1, 2**63 - 1, 5))) == ("entry", 2)
    assert index.best(key_of((2**63 - 1, -1))) is None


@pytest.mark.parametrize("query", [(1,), (1, 2), (1, 2, 3)])
def test_items_of_one_key_are_offered_one_after_the_other(
    index: PrefixIndex[int],
    query: tuple[int, ...],
) -> None:
    for seq in (4, 2, 0, 3, 1):
        index.add(key_of((1, 2)), seq, seq)
    asked: list[int] = []

    def only_four(seq: int, matched_tokens: int = 0) -> bool:
        asked.append(seq)
        return seq == 4

    index.best(key_of(query), accept=only_four)
    index.oldest(key_of(query), accept=only_four)
    assert asked == [0, 1, 2, 3, 4] * 2


def test_a_place_that_was_removed_is_refused(index: PrefixIndex[str]) -> None:
    place = index.add(key_of((1,)), 1, "item")
    index.remove(place)
    with pytest.raises(ValueError, match="taken out"):
        index.remove(place)


@pytest.mark.parametrize("nbytes", [1, 7, 9])
def test_a_key_of_broken_tokens_is_refused(
    index: PrefixIndex[str], nbytes: int
) -> None:
    with pytest.raises(ValueError, match="whole tokens"):
        index.add(bytes(nbytes), 1, "item")
    with pytest.raises(ValueError, match="whole tokens"):
        index.best(bytes(nbytes))


def test_shared_first_tokens_are_stored_once(index: PrefixIndex[int]) -> None:
    for number in range(100):
        index.add(key_of((*range(1_000), number)), number, number)
    assert sum(map(len, edges_of(index))) == 8 * (1_000 + 100)


def test_removing_leaves_one_edge_where_two_had_parted(index: PrefixIndex[str]) -> None:
    index.add(key_of((1, 2, 3, 4)), 1, "stays")
    alone = edges_of(index)
    places = [index.add(key_of((1, 2, *tail)), 2, "goes") for tail in ((), (5,), (3,))]
    assert len(edges_of(index)) > len(alone)
    for place in places:
        index.remove(place)
    assert edges_of(index) == alone
    assert index.best(key_of((1, 2, 3, 4))) == ("stays", 4)


def test_a_removed_item_is_freed_without_the_garbage_collector(
    index: PrefixIndex[Named],
) -> None:
    index.add(key_of((1, 2)), 1, Named())
    gc.disable()
    try:
        place = index.add(key_of((1, 3)), 0, Named())
        watched = weakref.ref(place.item)
        index.remove(place)
        del place
        assert watched() is None
    finally:
        gc.enable()


ONE, TWO, THREE = (bytes([n]) * 8 for n in (1, 2, 3))


def test_an_edge_parts_between_two_bytes_of_a_token() -> None:
    tree: PrefixTree[int] = PrefixTree()
    first, second = b"\1\2\3\4\0\0\0\0", b"\1\2\3\5\0\0\0\0"
    above = tree.node_for(first).parent
    tree.node_for(second)
    parting = tree.node_for(first).parent
    assert above is tree.root
    assert parting is not None and parting.edge == b"\1\2\3"


def node_with(tree: PrefixTree[str], key: bytes, *seqs: int) -> Node[str]:
    node = tree.node_for(key)
    for seq in seqs:
        put(Place(node, seq, f"{seq}"), node)
    return node


def test_of_many_places_any_is_taken_in_any_order() -> None:
    tree: PrefixTree[str] = PrefixTree()
    seqs = random.Random(1).sample(range(1000), 300)
    node = node_with(tree, ONE, *seqs)
    places = {place.seq: place for place in ascending(node)}
    assert list(places) == sorted(seqs)
    for seq in seqs[:-1]:
        take(places.pop(seq), node)
        assert tree.root.lowest is places[min(places)]
    assert [*ascending(tree.root)] == [*places.values()]


def test_places_come_in_the_order_of_their_seq() -> None:
    tree: PrefixTree[str] = PrefixTree()
    for key, seqs in ((ONE, (5, 1)), (ONE + TWO, (4, 2)), (TWO, (3,)), (b"", (0,))):
        node_with(tree, key, *seqs)
    assert [place.seq for place in ascending(tree.root)] == [0, 1, 2, 3, 4, 5]
    assert [place.seq for place in ascending(tree.node_for(ONE))] == [1, 2, 4, 5]
    assert list(ascending(PrefixTree[str]().root)) == []


def test_single_nodes_and_subtrees_are_merged_with_what_each_matches() -> None:
    tree: PrefixTree[str] = PrefixTree()
    above, below = node_with(tree, ONE, 3, 1), node_with(tree, ONE + TWO, 2)
    frontier: Frontier[str] = Frontier()
    frontier.add_places(above, 0, 8)
    frontier.add_places(tree.root, 0, 0)
    frontier.add_subtree(below, 16)
    found = [(place.seq, nbytes) for place, nbytes in frontier.ascending()]
    assert found == [(1, 8), (2, 16), (3, 8)]


def test_taking_the_lowest_leaves_the_next_of_all_below() -> None:
    tree: PrefixTree[str] = PrefixTree()
    one = node_with(tree, ONE, 1)
    for key, seq in ((ONE + TWO, 3), (TWO, 2)):
        node_with(tree, key, seq)
    assert tree.root.lowest is not None and tree.root.lowest.seq == 1
    take(tree.root.lowest, one)
    assert tree.root.lowest.seq == 2

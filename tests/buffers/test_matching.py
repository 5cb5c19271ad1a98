from __future__ import annotations

import gc
import random
import struct
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from asynckv.buffers.matching import Place, PrefixIndex

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
        self.is_visible = True

    def matched(self, query: tuple[int, ...]) -> int:
        shared = min(len(query), len(self.tokens))
        return shared if query[:shared] == self.tokens[:shared] else 0


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
        # Distinct and unordered seqs: what is given back comes with an old one.
        model = Model(tokens, seq * 64 + self.added, self.added)
        self.added += 1
        self.models.append(model)
        return self.index.add(key_of(tokens), model.seq, model)

    @rule(target=places, tokens=token_lists, shorter=st.integers(0, 6), seq=seqs)
    def add_two_that_share(
        self, tokens: tuple[int, ...], shorter: int, seq: int
    ) -> object:
        return multiple(self.add(tokens, seq), self.add(tokens[:shorter], -seq))

    @rule(place=consumes(places))
    def remove(self, place: Place[Model]) -> None:
        self.models.remove(place.item)
        self.index.remove(place)

    @rule(place=places)
    def hide(self, place: Place[Model]) -> None:
        place.item.is_visible = False
        self.index.hide(place)

    @rule(place=places)
    def show(self, place: Place[Model]) -> None:
        place.item.is_visible = True
        self.index.show(place)

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
            assert self.index.nbytes == 0

    def may_be(self, model: Model, refused: set[int] | None) -> bool:
        return model.is_visible and model.number not in (refused or ())

    def refusing(self, refused: set[int]) -> Callable[[Model], bool]:
        asked: set[int] = set()

        def accept(model: Model) -> bool:
            assert model.is_visible
            assert model.number not in asked, "asked twice"
            asked.add(model.number)
            return model.number not in refused

        return accept


IndexAgainstBruteForce.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None
)
TestIndexAgainstBruteForce = IndexAgainstBruteForce.TestCase

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.cli.demo.decode import DecodeWorker
from asynckv.cli.demo.messages import (
    Computed,
    Continue,
    Doing,
    FillBuffer,
    Filled,
    Generated,
    KeptEntry,
    Landed,
    Note,
    Prefill,
    Prefilled,
    ReadBack,
    Select,
    SelectSlowly,
    SlowlySelected,
    Text,
    WaitReturned,
    Way,
)
from asynckv.cli.demo.models import ByteTokenizer
from asynckv.cli.demo.prefill import PrefillWorker
from asynckv.cli.demo.worker import Engine
from asynckv.integrations.transformers import fingerprint_of

PROMPT = tuple(range(1, 21))
SECOND = (*range(1, 16), 7, 7, 7)


class Stage:
    """A prefill and a decode worker at the two ends of a local buffer."""

    def __init__(self, engine: Engine, lookup: LookupBuffer) -> None:
        self.told: list[Note] = []
        self.lookup = lookup
        self.prefill = PrefillWorker(
            self.told.append, engine, ByteTokenizer(), lookup, document_tokens=15
        )
        self.decode = DecodeWorker(self.told.append, contextlib.AsyncExitStack())
        self.decode.use(engine, lookup, SECOND)


@pytest.fixture
async def stage(engine: Engine) -> AsyncIterator[Stage]:
    """Return both workers, with a tiny model."""
    lookup = LookupBuffer("1MiB", fingerprint=fingerprint_of(engine.model))
    yield Stage(engine, lookup)
    lookup.abort()


async def generated(stage: Stage, order: Continue | Select) -> Generated:
    note = await stage.decode.do(order)
    assert isinstance(note, Generated)
    return note


@pytest.mark.parametrize("way", ["bulk", "layerwise"])
async def test_one_position_is_computed_and_the_tokens_are_the_same(
    stage: Stage, way: Way
) -> None:
    expected = await generated(stage, Continue())
    await stage.prefill.do(Prefill(way, "a"))
    done = await generated(stage, Select(way, "a"))
    assert expected.prompt_positions == len(PROMPT)
    assert (done.prompt_positions, done.attempt) == (1, 1)
    assert done.tokens == expected.tokens


async def test_recomputing_may_end_with_the_first_token(stage: Stage) -> None:
    whole = await generated(stage, Continue(second=True))
    first = await generated(stage, Continue(second=True, first_only=True))
    assert first.tokens == whole.tokens[:1]
    assert first.prompt_positions == len(SECOND)


async def test_layers_are_told_as_they_land(stage: Stage) -> None:
    await stage.prefill.do(Prefill("layerwise", "a"))
    done = await generated(stage, Select("layerwise", "a"))
    assert [note for note in stage.told if isinstance(note, Landed)] == [
        Landed(layer) for layer in range(4)
    ]
    assert list(done.landed_s) == sorted(done.landed_s)


async def test_a_second_request_computes_only_what_the_kept_document_lacks(
    stage: Stage,
) -> None:
    expected = await generated(stage, Continue(second=True))
    await stage.prefill.do(Prefill("layerwise", "a", document_only=True))
    done = await generated(stage, Select("layerwise", "a", second=True))
    assert (done.matched_tokens, done.prompt_positions) == (15, 3)
    assert done.tokens == expected.tokens


async def test_it_tells_which_layer_it_recomputes_and_which_token_it_decodes(
    stage: Stage,
) -> None:
    await stage.decode.do(Continue())
    assert [note for note in stage.told if isinstance(note, Doing)] == [
        *(Doing("recomputing: layer", layer, 4) for layer in range(1, 5)),
        *(Doing("decoding: token", token, 48) for token in range(1, 49)),
    ]


async def test_slow_selecting_takes_entries_in_order(stage: Stage) -> None:
    for entry_id in ("a", "b"):
        await stage.prefill.do(Prefill("bulk", entry_id))
    note = await stage.decode.do(SelectSlowly(2, 0.0))
    assert isinstance(note, SlowlySelected)
    assert note.entry_ids == ("a", "b")


async def test_a_decoder_does_not_read_back(stage: Stage) -> None:
    with pytest.raises(ValueError, match="ReadBack"):
        await stage.decode.do(ReadBack(()))


@pytest.mark.parametrize("way", ["bulk", "layerwise"])
async def test_a_prefill_leaves_its_entry_in_the_buffer(stage: Stage, way: Way) -> None:
    await stage.prefill.do(Prefill(way, "a"))
    assert await stage.lookup.peek(PROMPT) == len(PROMPT)


async def test_of_a_document_only_its_own_tokens_are_kept(stage: Stage) -> None:
    await stage.prefill.do(Prefill("layerwise", "a", document_only=True))
    assert await stage.lookup.peek(PROMPT) == 15


async def test_layers_are_handed_over_while_the_prefill_computes(stage: Stage) -> None:
    note = await stage.prefill.do(Prefill("layerwise", "a"))
    assert isinstance(note, Prefilled)
    for (start_s, end_s), handed_s in zip(note.spans, note.handed_s, strict=True):
        assert start_s <= handed_s <= end_s
    assert stage.told == [Computed(layer) for layer in range(4)]


async def test_in_bulk_everything_is_handed_over_at_the_end(stage: Stage) -> None:
    note = await stage.prefill.do(Prefill("bulk", "a"))
    assert isinstance(note, Prefilled)
    assert min(note.handed_s) >= note.ended_s >= note.spans[-1][1]


async def test_filling_inserts_what_was_computed_before(stage: Stage) -> None:
    await stage.prefill.do(Prefill("bulk", "a"))
    note = await stage.prefill.do(FillBuffer(("b", "c")))
    assert isinstance(note, Filled)
    assert len(note.waits_s) == 2
    assert stage.lookup.statistics().entries == 3


async def test_an_entry_that_is_there_is_back(stage: Stage) -> None:
    await stage.prefill.do(Prefill("bulk", "a"))
    note = await stage.prefill.do(WaitReturned())
    assert isinstance(note, KeptEntry)
    assert note.matched_tokens == len(PROMPT)


async def test_tokens_are_read_back(stage: Stage) -> None:
    assert await stage.prefill.do(ReadBack((72, 105))) == Text("Hi")


async def test_a_prefill_does_not_decode(stage: Stage) -> None:
    with pytest.raises(ValueError, match="Continue"):
        await stage.prefill.do(Continue())

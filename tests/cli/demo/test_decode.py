from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.cli.demo.decode import DecodeWorker
from asynckv.cli.demo.messages import (
    Continue,
    Doing,
    Generated,
    Landed,
    Note,
    Prefill,
    ReadBack,
    Select,
    SelectSlowly,
    SlowlySelected,
    Way,
)
from asynckv.cli.demo.models import ByteTokenizer
from asynckv.cli.demo.prefill import PrefillWorker
from asynckv.cli.demo.worker import Engine
from asynckv.integrations.transformers import fingerprint_of

PROMPT = tuple(range(20))
SECOND = (*range(15), 7, 7, 7)


class Stage:
    """A prefill and a decode worker at the two ends of a local buffer."""

    def __init__(self, engine: Engine, lookup: LookupBuffer) -> None:
        self.told: list[Note] = []
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

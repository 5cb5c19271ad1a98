from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.cli.demo.messages import (
    Computed,
    Continue,
    FillBuffer,
    Filled,
    KeptEntry,
    Note,
    Prefill,
    Prefilled,
    ReadBack,
    Text,
    WaitReturned,
    Way,
)
from asynckv.cli.demo.models import ByteTokenizer
from asynckv.cli.demo.prefill import PrefillWorker
from asynckv.cli.demo.worker import Engine
from asynckv.integrations.transformers import fingerprint_of

PROMPT = tuple(range(20))


class Stage:
    """A prefill worker, its buffer and what it told."""

    def __init__(self, engine: Engine) -> None:
        self.told: list[Note] = []
        self.lookup = LookupBuffer("1MiB", fingerprint=fingerprint_of(engine.model))
        self.worker = PrefillWorker(
            self.told.append, engine, ByteTokenizer(), self.lookup, document_tokens=12
        )


@pytest.fixture
async def stage(engine: Engine) -> AsyncIterator[Stage]:
    """Return a prefill worker with a tiny model."""
    stage = Stage(engine)
    yield stage
    stage.lookup.abort()


@pytest.mark.parametrize("way", ["bulk", "layerwise"])
async def test_a_prefill_leaves_its_entry_in_the_buffer(stage: Stage, way: Way) -> None:
    await stage.worker.do(Prefill(way, "a"))
    assert await stage.lookup.peek(PROMPT) == len(PROMPT)


async def test_of_a_document_only_its_own_tokens_are_kept(stage: Stage) -> None:
    await stage.worker.do(Prefill("layerwise", "a", document_only=True))
    assert await stage.lookup.peek(PROMPT) == 12


async def test_layers_are_handed_over_while_the_prefill_computes(stage: Stage) -> None:
    note = await stage.worker.do(Prefill("layerwise", "a"))
    assert isinstance(note, Prefilled)
    for (start_s, end_s), handed_s in zip(note.spans, note.handed_s, strict=True):
        assert start_s <= handed_s <= end_s
    assert stage.told == [Computed(layer) for layer in range(4)]


async def test_in_bulk_everything_is_handed_over_at_the_end(stage: Stage) -> None:
    note = await stage.worker.do(Prefill("bulk", "a"))
    assert isinstance(note, Prefilled)
    assert min(note.handed_s) >= note.ended_s >= note.spans[-1][1]


async def test_filling_inserts_what_was_computed_before(stage: Stage) -> None:
    await stage.worker.do(Prefill("bulk", "a"))
    note = await stage.worker.do(FillBuffer(("b", "c")))
    assert isinstance(note, Filled)
    assert len(note.waits_s) == 2
    assert stage.lookup.statistics().entries == 3


async def test_an_entry_that_is_there_is_back(stage: Stage) -> None:
    await stage.worker.do(Prefill("bulk", "a"))
    note = await stage.worker.do(WaitReturned())
    assert isinstance(note, KeptEntry)
    assert note.matched_tokens == len(PROMPT)


async def test_tokens_are_read_back(stage: Stage) -> None:
    assert await stage.worker.do(ReadBack((72, 105))) == Text("Hi")


async def test_a_prefill_does_not_decode(stage: Stage) -> None:
    with pytest.raises(ValueError, match="Continue"):
        await stage.worker.do(Continue())

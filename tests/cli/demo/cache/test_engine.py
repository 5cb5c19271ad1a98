"""An engine, in this process, with a store of its own; and a server, which asks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import asynckv
from asynckv.cli.demo.cache.engine import CacheEngine
from asynckv.cli.demo.cache.report import CHUNK_TOKENS
from asynckv.cli.demo.messages import (
    Answered,
    Ask,
    FirstToken,
    Note,
    Stored,
    UseStore,
    WaitReturned,
    WaitStored,
)
from asynckv.cli.demo.models import ByteTokenizer
from asynckv.cli.demo.worker import Engine

DOCUMENT = 40 * "a long tale "


class Told(list[Note]):
    """What an engine has said, and the engine."""

    engine: CacheEngine


@pytest.fixture
async def told(engine: Engine, tmp_path: Path) -> AsyncIterator[Told]:
    """Return an engine with a tiny model, and with nothing stored."""
    told = Told()
    async with contextlib.AsyncExitStack() as stack:
        told.engine = CacheEngine(told.append, stack, "random-tiny", tmp_path)
        told.engine.use(engine, ByteTokenizer(256))
        await told.engine.do(UseStore(max_bytes=2**20))
        yield told


async def answered(told: Told, *turns: str, document: str = DOCUMENT) -> Answered:
    note = await told.engine.do(Ask(turns, 4, document))
    assert isinstance(note, Answered)
    return note


async def test_what_a_prompt_shares_with_an_earlier_one_is_not_computed(
    told: Told,
) -> None:
    first = await answered(told, "What is it?")
    again = await answered(told, "Who was she?")
    assert (first.found_tokens, first.by_tier) == (0, {})
    assert first.computed_tokens == first.prompt_tokens
    assert (again.found_tokens, again.by_tier) == (3 * CHUNK_TOKENS, {"memory": 3})
    assert again.computed_tokens == again.prompt_tokens - 3 * CHUNK_TOKENS


async def test_another_store_begins_with_nothing_and_gives_the_same_tokens(
    told: Told,
) -> None:
    await answered(told, "What is it?")
    again = await answered(told, "Who was she?")
    await told.engine.do(UseStore(max_bytes=2**20))
    cold = await answered(told, "Who was she?")
    assert cold.found_tokens == 0 and cold.tokens == again.tokens
    assert len(cold.text) == len(cold.tokens) == 4


async def test_the_first_token_is_told_once_before_the_answer(told: Told) -> None:
    told.clear()
    await answered(told, "What?")
    assert told == [FirstToken()]


async def test_blocks_that_a_tier_never_gets_are_counted(told: Told) -> None:
    await answered(told, "What?")
    stored = await told.engine.do(WaitStored("memory"))
    assert isinstance(stored, Stored) and len(stored.keys) == 3
    waited = await told.engine.do(WaitStored("disk", 0.05))
    assert isinstance(waited, Stored)
    assert waited.keys == () and {*waited.missing} == {*stored.keys}


async def test_a_served_store_is_found_by_its_url(told: Told) -> None:
    async with (
        asynckv.StoreBuffer("1MiB") as store,
        asynckv.serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        await told.engine.do(UseStore(server.url))
        await answered(told, "What?")
        assert store.statistics().keys == 3


async def test_an_order_that_cannot_be_carried_out_is_an_error(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engine = CacheEngine(lambda _: None, stack, "random-tiny", tmp_path)
        with pytest.raises(ValueError, match="no model is loaded"):
            await engine.do(Ask(("What?",), 4))
        with pytest.raises(ValueError, match="there is no store"):
            await engine.do(WaitStored("disk"))
        with pytest.raises(ValueError, match="does not know WaitReturned"):
            await engine.do(WaitReturned())

"""Prompts that begin alike: their KV is computed once, and the tokens are the same."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

import asynckv
from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import ConfigError
from asynckv.integrations.transformers import (
    continue_from,
    load_prefix,
    store_prefix,
)
from asynckv.stores.disk import DiskTier
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import CANCEL_MODES

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
async def store() -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("64MiB") as store:
        yield store


def filled(model: Any, prompt: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()  # of every layer it keeps all
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    return cache


def another(prompt: torch.Tensor, shared: int) -> torch.Tensor:
    """A prompt that begins alike, and goes on otherwise."""
    return torch.cat([prompt[:, :shared], prompt[:, :shared].flip(1)], dim=1)


async def generated(
    model: PreTrainedModel, prompt: torch.Tensor, store: KVStoreBuffer
) -> tuple[torch.Tensor, int]:
    """Return what follows a prompt, and how many positions of it were stored."""
    handoff = await load_prefix(model, prompt, store, chunk_tokens=8)
    assert handoff is not None
    output = await continue_from(handoff, **GREEDY)
    assert output.prompt_positions_computed == prompt.shape[1] - min(
        output.matched_tokens, prompt.shape[1] - 1
    )
    return output.sequences, output.matched_tokens


@pytest.mark.parametrize(
    "kind", ["full", "gqa", "sliding", "alternating", "latent", "shared"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_prompt_goes_on_from_what_another_one_began_with(
    model_of: Callable[..., PreTrainedModel],
    prompt: torch.Tensor,
    reference: Callable[..., torch.Tensor],
    store: StoreBuffer,
    kind: str,
    dtype: torch.dtype,
) -> None:
    model = model_of(kind, dtype)
    stored = await store_prefix(
        model, prompt, filled(model, prompt), store, chunk_tokens=8
    )
    assert stored == 40
    longer = another(prompt, 27)
    handoff = await load_prefix(model, longer, store, chunk_tokens=8)
    assert handoff is not None
    assert handoff.length == 24
    mine: list[Any] = handoff.generate_kwargs()["past_key_values"].layers
    computed: list[Any] = filled(model, prompt).layers
    for ours, theirs in zip(mine, computed, strict=False):  # some only share another's
        rows = slice(24 - ours.keys.shape[-2], 24)
        assert torch.equal(ours.keys, theirs.keys[..., rows, :])
        assert torch.equal(ours.values, theirs.values[..., rows, :])
    if dtype == torch.float32:
        sequences, matched = await generated(model, longer, store)
        assert matched == 24
        assert torch.equal(sequences, reference(model, longer))
        sequences, matched = await generated(model, prompt, store)
        assert matched == 40
        assert torch.equal(sequences, reference(model, prompt))


async def test_a_conversation_stores_what_it_has_gone_on_to(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    reference: Callable[..., torch.Tensor],
    store: StoreBuffer,
) -> None:
    await store_prefix(model, prompt, filled(model, prompt), store, chunk_tokens=8)
    handoff = await load_prefix(model, prompt, store, chunk_tokens=8)
    assert handoff is not None
    output = await continue_from(
        handoff, return_dict_in_generate=True, max_new_tokens=17, do_sample=False
    )
    given: Any = output.output
    cache: Cache = given.past_key_values
    puts = store.statistics().puts
    stored = await store_prefix(model, output.sequences, cache, store, chunk_tokens=8)
    assert stored == 56  # the last token of 57 was not computed with
    assert store.statistics().puts == puts + 2
    sequences, matched = await generated(model, output.sequences, store)
    assert matched == 56
    assert torch.equal(sequences, reference(model, output.sequences))


async def test_what_is_stored_is_found_by_the_same_model_tomorrow(
    model_of: Callable[..., PreTrainedModel], prompt: torch.Tensor, tmp_path: Path
) -> None:
    model, tier = model_of("gqa"), f"disk://{tmp_path}?max=64MiB"
    async with asynckv.TieredStore("16MiB", [tier]) as store:
        await store_prefix(model, prompt, filled(model, prompt), store, chunk_tokens=8)
        await store.flush()
    disk = DiskTier.from_url(tier)
    async with (
        asynckv.TieredStore("16MiB", [disk]) as store,
        asynckv.serve("tcp://127.0.0.1:0", store=store) as server,
        asynckv.connect(server.url) as peer,
    ):
        await disk.scanned()
        _, matched = await generated(model, prompt, peer.store)
        assert matched == 40
        for other, name, salt in (
            (model_of("full"), "", ""),
            (model_of("gqa", torch.bfloat16), "", ""),
            (model, "other weights", ""),
            (model, "", "another tenant"),
        ):
            nothing = await load_prefix(
                other, prompt, peer.store, name=name, salt=salt, chunk_tokens=8
            )
            assert nothing is None


async def test_a_prompt_of_which_its_beginning_is_not_stored_has_nothing(
    model: PreTrainedModel, prompt: torch.Tensor, store: StoreBuffer
) -> None:
    await store_prefix(model, prompt, filled(model, prompt), store, chunk_tokens=8)
    assert await load_prefix(model, prompt.flip(1), store, chunk_tokens=8) is None
    assert await load_prefix(model, prompt[:, :7], store, chunk_tokens=8) is None


async def test_a_prompt_with_images_needs_a_salt_that_says_which_they_are(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    store: StoreBuffer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = int(prompt[0, 5])
    monkeypatch.setattr(model.config, "image_token_id", token, raising=False)
    cache = filled(model, prompt)
    with pytest.raises(ValueError, match="image tokens"):
        await store_prefix(model, prompt, cache, store, chunk_tokens=8)
    with pytest.raises(ValueError, match="image tokens"):
        await load_prefix(model, prompt, store, chunk_tokens=8)
    stored = await store_prefix(
        model, prompt, cache, store, salt="one image", chunk_tokens=8
    )
    assert stored == 40
    for salt, is_there in (("one image", True), ("another", False)):
        found = await load_prefix(model, prompt, store, salt=salt, chunk_tokens=8)
        assert (found is not None) is is_there


async def test_what_cannot_be_a_prefix_is_refused(
    model_of: Callable[..., PreTrainedModel],
    prompt: torch.Tensor,
    padded: tuple[torch.Tensor, torch.Tensor],
    store: StoreBuffer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("gqa")
    with pytest.raises(ValueError, match="of one prompt .* not of 3 rows"):
        await load_prefix(model, padded[0], store)
    monkeypatch.setattr(model.generation_config, "pad_token_id", 0)
    begins_with_pads = torch.cat([prompt.new_zeros(1, 4), prompt], dim=1)
    with pytest.raises(ValueError, match="of one prompt .* padded by 4"):
        await load_prefix(model, begins_with_pads, store)
    sliding = model_of("sliding")
    cache = DynamicCache(config=sliding.config)  # it keeps a window alone
    with torch.no_grad():
        sliding(prompt, past_key_values=cache)
    for some in (prompt, prompt[:, :8]):  # what it has kept is not of the first eight
        with pytest.raises(ConfigError, match="layer 0 .* has not kept all positions"):
            await store_prefix(sliding, some, cache, store, chunk_tokens=8)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
async def test_prompts_share_kv_up_to_the_length_at_which_it_is_another(
    model_of: Callable[..., PreTrainedModel],
    prompt: torch.Tensor,
    reference: Callable[..., torch.Tensor],
    store: StoreBuffer,
    kind: str,
) -> None:
    model = model_of(kind)
    with pytest.raises(ConfigError, match=f"{kind}.*one here has 40"):
        await store_prefix(model, prompt[:, :16], filled(model, prompt), store)
    short = prompt[:, :24]
    await store_prefix(model, short, filled(model, short), store, chunk_tokens=8)
    with pytest.raises(ConfigError, match=f"{kind}.*one here has 40"):
        await load_prefix(model, prompt, store, chunk_tokens=8)
    sequences, matched = await generated(model, prompt[:, :20], store)
    assert matched == 16
    assert torch.equal(sequences, reference(model, prompt[:, :20]))


async def test_a_cache_of_another_dtype_is_refused(
    model_of: Callable[..., PreTrainedModel], prompt: torch.Tensor, store: StoreBuffer
) -> None:
    cache = filled(model_of("gqa", torch.bfloat16), prompt)
    with pytest.raises(ConfigError, match="layer 0 of the cache is torch.bfloat16"):
        await store_prefix(model_of("gqa", torch.float16), prompt, cache, store)
    assert not store.statistics().keys


async def test_a_value_that_is_none_of_this_model_ends_the_prefix(
    model: PreTrainedModel, prompt: torch.Tensor, store: StoreBuffer
) -> None:
    puts: list[str] = []
    put = store.put

    async def noted(key: str, *args: Any, **options: Any) -> None:
        puts.append(key)
        await put(key, *args, **options)

    store.put = noted  # type: ignore[method-assign]
    await store_prefix(model, prompt, filled(model, prompt), store, chunk_tokens=8)
    await put(puts[2], torch.zeros(3, dtype=torch.uint8))  # they go in from the last
    _, matched = await generated(model, prompt, store)
    assert matched == 16


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[KVStoreBuffer]:
    async with (
        StoreBuffer("64MiB") as store,
        asynckv.serve("mem://prefixes", store=store) as server,
        asynckv.connect(server.url) as peer,
    ):
        yield peer.store


async def test_both_may_be_cancelled_anywhere(
    model: PreTrainedModel, prompt: torch.Tensor
) -> None:
    cache = filled(model, prompt)
    async with served() as store:

        async def stored(k: int, mode: CancelMode, outcome: Outcome[int]) -> None:
            assert outcome.cancelled or outcome.value == 40
            await store_prefix(model, prompt, cache, store, chunk_tokens=20)

        await sweep_cancellation(
            lambda: store_prefix(model, prompt, cache, store, chunk_tokens=20),
            stored,
            modes=CANCEL_MODES,
        )

        async def loaded(k: int, mode: CancelMode, outcome: Outcome[Any]) -> None:
            loaded: Any = outcome.value
            assert outcome.cancelled or loaded.length == 40

        await sweep_cancellation(
            lambda: load_prefix(model, prompt, store, chunk_tokens=20),
            loaded,
            modes=CANCEL_MODES,
        )

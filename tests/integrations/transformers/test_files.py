from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from asynckv.abc import KVEntry, KVLookupBuffer
from asynckv.integrations.transformers import (
    continue_from,
    handoff_of,
    load_entry,
    prefill,
    save_entry,
)


async def test_an_entry_continues_from_a_file(
    model: PreTrainedModel,
    lookup: KVLookupBuffer,
    prompt: torch.Tensor,
    reference: Any,
    tmp_path: Path,
) -> None:
    await prefill(model, prompt, lookup, carry=("first_token", "hidden"))
    selected = await lookup.drop_select(prompt[0])
    await asyncio.to_thread(save_entry, selected, tmp_path / "prompt")
    entry = await asyncio.to_thread(load_entry, tmp_path / "prompt")
    done = await continue_from(
        handoff_of(model, entry, prompt), max_new_tokens=8, do_sample=False
    )
    assert torch.equal(done.sequences, reference(model, prompt))


def test_every_part_comes_back(tmp_path: Path) -> None:
    part = torch.ones(2, 2, dtype=torch.bfloat16).t()
    entry = KVEntry(
        torch.arange(4), torch.ones(4), {"a.b": part}, {"a.b": part}, part, {"x": part}
    )
    save_entry(entry, tmp_path / "entry")
    back = load_entry(tmp_path / "entry")
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]
    assert isinstance(back.key, dict)
    assert isinstance(back.value, dict)
    assert back.hidden is not None
    parts = (back.key["a.b"], back.value["a.b"], back.hidden, back.extras["x"])
    assert all(torch.equal(found, part) for found in parts)
    assert back.input_tokens is not None
    assert back.input_tokens.tolist() == [0, 1, 2, 3]


def test_what_is_no_entry_is_refused(tmp_path: Path) -> None:
    save_file({"weights": torch.ones(1)}, tmp_path / "model")
    with pytest.raises(ValueError, match="'weights' is none of its names"):
        load_entry(tmp_path / "model")

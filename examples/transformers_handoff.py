"""Prefill with a Hugging Face model in one process, generate from it in another.

In two terminals, this one first; each takes a model's name or folder:

    python examples/transformers_handoff.py prefill tcp://127.0.0.1:14579 MODEL
    python examples/transformers_handoff.py decode tcp://127.0.0.1:14579 MODEL

Without arguments it starts the decoding process itself, with a tiny random model.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import asynckv
from asynckv.integrations.transformers import fingerprint_of, generate_from, prefill

PROMPT = torch.arange(2, 402)[None] % 97  # what a tokenizer has in ["input_ids"]
TINY = LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=4
)


def load_model(name: str) -> Any:
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(TINY).eval()


async def serve(url: str, name: str, *, starts_other: bool) -> None:
    model = load_model(name)
    # A config tells no weights apart: the name does. Both sides need the same one.
    buffer = asynckv.LookupBuffer("1GiB", fingerprint=fingerprint_of(model, name=name))
    async with asynckv.serve(url, lookup=buffer) as server, buffer:
        print(f"prefill: serving at {server.url}", flush=True)
        other = None
        if starts_other:
            other = await asyncio.create_subprocess_exec(
                sys.executable, str(Path(__file__)), "decode", server.url
            )
        # Each layer leaves as soon as it is computed.
        prefilled = await prefill(model, PROMPT, buffer, name=name)
        if other is None:
            await buffer.taken(prefilled.entry_id)
        else:
            assert await other.wait() == 0


async def decode(url: str, name: str) -> None:
    model = load_model(name)
    mark = fingerprint_of(model, name=name)
    async with asynckv.connect(url, fingerprint=mark) as peer:
        done = await generate_from(
            model, PROMPT, peer.lookup, name=name, max_new_tokens=8, do_sample=False
        )
    new_tokens = done.sequences[0, PROMPT.shape[1] :].tolist()
    computed = done.prompt_positions_computed
    print(f"decode: {new_tokens}, {computed} positions of the prompt computed here")
    alone = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    print("the same as alone:", torch.equal(done.sequences, alone), flush=True)


async def main(role: str = "", url: str = "tcp://127.0.0.1:0", model: str = "") -> None:
    if role == "decode":
        return await decode(url, model)
    await serve(url, model, starts_other=not role)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))

"""A pipe between two processes: the layers of prompts go one way, tokens come back.

In two terminals, this one first; each says what it does:

    python examples/pipe.py prefill tcp://127.0.0.1:14579
    python examples/pipe.py decode tcp://127.0.0.1:14579

Without arguments it starts the decoding process itself.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

import asynckv

LAYERS, HEADS, WIDTH = 16, 4, 64
PROMPTS = ["What is a pipe?", "Which way does it go?" * 40, "And who waits?"]


def compute(tokens: torch.Tensor, layer: int) -> torch.Tensor:
    """Stand in for a model: the K and V of one layer, made of the token ids."""
    key = (tokens + layer).float()[None, :, None].expand(HEADS, -1, WIDTH)
    return torch.stack([key, -key])


async def prefill(pipe: asynckv.KVPipe) -> None:
    for prompt in PROMPTS:
        tokens = torch.tensor(list(prompt.encode()))
        await pipe.send_tensor(tokens)
        for layer in range(LAYERS):
            # It returns once the pipe has copied it: the next layer is computed while
            # this one is on its way. It waits only where much is on its way already.
            await pipe.send_tensor(compute(tokens, layer))
        answer = await pipe.recv_tensor()
        assert answer is not None
        print(f"prefill: {prompt[:21]!r} goes on with {answer.tolist()}", flush=True)


async def decode(pipe: asynckv.KVPipe) -> None:
    async for tokens in pipe:  # it ends when the other side leaves its pipe
        assert tokens is not None
        cache = torch.empty(LAYERS, 2, HEADS, len(tokens), WIDTH)
        for layer in range(LAYERS):
            await pipe.recv_tensor(into=cache[layer])
            assert torch.equal(cache[layer], compute(tokens, layer))
        print(f"decode: {cache.nbytes >> 10} KiB of {len(tokens)} tokens", flush=True)
        await pipe.send_tensor(tokens[-3:].flip(0))


async def listen(url: str, *, starts_other: bool) -> None:
    async with asynckv.listen_pipe(url) as listener:
        print(f"prefill: listening at {listener.url}", flush=True)
        other = None
        if starts_other:
            other = await asyncio.create_subprocess_exec(
                sys.executable, str(Path(__file__)), "decode", listener.url
            )
        async with await listener.accept() as pipe:
            await prefill(pipe)
        if other is not None:
            assert await other.wait() == 0


async def main(role: str | None = None, url: str = "tcp://127.0.0.1:0") -> None:
    if role == "decode":
        async with asynckv.open_pipe(url) as pipe:
            return await decode(pipe)
    await listen(url, starts_other=role is None)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))

"""Prefill: insert the KV of some prompts, for whoever connects.

In two terminals, this one first; each says what it does:

    python examples/producer.py tcp://127.0.0.1:14579
    python examples/consumer.py tcp://127.0.0.1:14579

Without a URL it starts the consumer itself.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import torch

import asynckv

PROMPTS = [f"Prompt {number}: why is the sky blue?" for number in range(8)]
CONSUMER = Path(__file__).with_name("consumer.py")


def tokenize(prompt: str) -> torch.Tensor:
    return torch.tensor(list(prompt.encode() * 32))


def prefill(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for a model: 16 layers, 4 heads of 32, made of the token ids."""
    key = tokens.float()[None, None, :, None].expand(16, 4, -1, 32)
    return key, -key


async def produce(buffer: asynckv.LookupBuffer) -> None:
    for prompt in PROMPTS:
        tokens = tokenize(prompt)
        key, value = prefill(tokens)
        began = time.perf_counter()
        # The buffer has room for two of these: insert waits for the consumer.
        await buffer.insert(tokens, None, key, value, None)
        waited_ms = 1000 * (time.perf_counter() - began)
        print(f"producer: {prompt!r} is in, after {waited_ms:.0f} ms", flush=True)


async def main(url: str | None) -> None:
    buffer = asynckv.LookupBuffer(max_bytes="40MiB", drain_s=60)
    # The buffer is left first: what is left in it is served until it is taken.
    async with asynckv.serve(url or "tcp://127.0.0.1:0", lookup=buffer) as server:
        print(f"producer: serving at {server.url}", flush=True)
        consumer = None
        if url is None:
            consumer = await asyncio.create_subprocess_exec(
                sys.executable, CONSUMER, server.url
            )
        async with buffer:
            await produce(buffer)
    if consumer is not None:
        assert await consumer.wait() == 0


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else None))

"""A toy engine with a paged KV cache hands a prompt to another one, layer by layer.

Each has blocks of its own; a layer is scattered while the next is still prefilled.
"""

from __future__ import annotations

import asyncio
import random

import torch

import asynckv

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 8, 64, 16, 4, 32
NAMES = [f"layers.{i}.{part}" for i in range(LAYERS) for part in ("key", "value")]


class PagedEngine:
    """Blocks of KV for each layer, and a list of those that are free."""

    def __init__(self, seed: int) -> None:
        shape = BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM
        self.cache = {name: torch.zeros(shape) for name in NAMES}
        self.free_blocks = list(range(BLOCKS))
        random.Random(seed).shuffle(self.free_blocks)

    def allocate(self, num_tokens: int) -> torch.Tensor:
        """Return a slot mapping: where in the blocks it took each token goes."""
        table = [self.free_blocks.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
        slots = torch.tensor(table)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
        return slots.flatten()[:num_tokens]

    def gather(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        return self.cache[name].flatten(0, 1)[slots]

    def scatter(self, name: str, slots: torch.Tensor, kv: torch.Tensor) -> None:
        self.cache[name].flatten(0, 1)[slots] = kv


async def prefill(
    engine: PagedEngine, tokens: torch.Tensor, buffer: asynckv.KVLookupBuffer
) -> torch.Tensor:
    slots = engine.allocate(len(tokens))
    spec = asynckv.TensorSpec((len(tokens), HEADS, HEAD_DIM), "float32")
    async with buffer.open_insert(tokens, None, dict.fromkeys(NAMES, spec)) as writer:
        for name in NAMES:
            engine.scatter(name, slots, torch.randn(spec.shape))  # the computation
            await writer.put(name, engine.gather(name, slots))
    return slots


async def decode(
    engine: PagedEngine, tokens: torch.Tensor, buffer: asynckv.KVLookupBuffer
) -> torch.Tensor:
    async with buffer.open_drop_select(tokens) as stream:
        slots = engine.allocate(len(tokens))
        async for name, kv in stream:
            engine.scatter(name, slots, kv)
    return slots


async def main() -> None:
    tokens, one, two = torch.arange(500), PagedEngine(seed=1), PagedEngine(seed=2)
    buffer = asynckv.LookupBuffer("64MiB")
    async with asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server, buffer:
        async with asynckv.connect(server.url) as peer, asyncio.TaskGroup() as group:
            decoding = group.create_task(decode(two, tokens, peer.lookup))
            here = await prefill(one, tokens, buffer)
    there = decoding.result()
    assert all(torch.equal(one.gather(n, here), two.gather(n, there)) for n in NAMES)
    print(
        f"{len(tokens)} tokens, {LAYERS} layers: from slots {here[::100].tolist()}..."
    )
    print(f"KV equal, in slots {here[::99].tolist()} and {there[::99].tolist()}")


if __name__ == "__main__":
    asyncio.run(main())

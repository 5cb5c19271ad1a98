"""A prefix cache that processes share: what one has computed, no other computes again.

    asynckv serve --listen tcp://127.0.0.1:14579 --store 1GiB --fingerprint toy-1
    python examples/prefix_cache.py tcp://127.0.0.1:14579

as often as you like. Without a URL it serves the store itself, and starts one more
process that asks about the same document.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

import asynckv
from asynckv.connectors import prefix_block_keys

BLOCK = 16
DOCUMENT = "asynckv moves KV caches between processes. " * 40
QUESTIONS = ["What does it move?", "Between what?", "What does it move?"]


def compute(tokens: list[int], before: torch.Tensor) -> torch.Tensor:
    """Stand in for a model: the KV of a token depends on all tokens before it."""
    embedded = torch.tensor(tokens)[:, None] * torch.arange(1, 129)
    return torch.cat([before, embedded]).cumsum(0)[len(before) :]


async def prefill(
    store: asynckv.KVStoreBuffer, tokens: list[int]
) -> tuple[torch.Tensor, int]:
    """Return the KV of ``tokens``, and of how many of them it was in the store."""
    keys = prefix_block_keys(tokens, BLOCK)
    # Nothing of it is dropped meanwhile.
    async with store.pin(keys, prefix=True) as found:
        known = keys[: (*found, False).index(False)]
        # The first block last: it is of use to most prompts, so it is dropped last.
        blocks = await store.get_many(known[::-1])
    kept = [block for block in reversed(blocks) if block is not None]
    before = torch.cat([torch.zeros(0, 128, dtype=torch.int64), *kept])
    computed = compute(tokens[len(before) :], before[-1:])
    kv = torch.cat([before, computed])
    new = reversed(range(len(known), len(keys)))
    await store.put_many((keys[i], kv[i * BLOCK : (i + 1) * BLOCK]) for i in new)
    return kv, len(before)


async def answer(store: asynckv.KVStoreBuffer, who: str) -> None:
    saved = total = 0
    for question in QUESTIONS:
        tokens = list((DOCUMENT + question).encode())
        kv, hits = await prefill(store, tokens)
        assert torch.equal(kv, compute(tokens, kv[:0])), "as if nothing was kept"
        print(f"{who}: {question!r}: computed {len(tokens) - hits} of {len(tokens)}")
        saved, total = saved + hits, total + len(tokens)
    print(f"{who}: the store saved {saved / total:.1%} of the prefill", flush=True)


async def main(url: str | None) -> None:
    if url is not None:
        async with asynckv.connect(url, fingerprint="toy-1") as peer:
            return await answer(peer.store, "the other process")
    async with (
        asynckv.StoreBuffer("1GiB", fingerprint="toy-1") as store,
        asynckv.serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        await answer(store, "this process")
        other = [sys.executable, str(Path(__file__)), server.url]
        assert await (await asyncio.create_subprocess_exec(*other)).wait() == 0
        now = store.statistics()
        print(f"{now.keys} blocks, {now.hits} hits, {now.used_bytes >> 10} KiB")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else None))

"""Decode: take the KV of any prompt from the producer, until it has no more.

In two terminals, the producer first; each says what it does:

    python examples/producer.py tcp://127.0.0.1:14579
    python examples/consumer.py tcp://127.0.0.1:14579

Without a URL it starts the producer itself.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

import asynckv

PRODUCER = Path(__file__).with_name("producer.py")


def decode(entry: asynckv.KVEntry) -> str:
    """Stand in for a model: check the KV against the tokens that it was made of."""
    key, value, tokens = entry.key_tensor, entry.value_tensor, entry.input_tokens
    assert tokens is not None and torch.equal(key[7, 3, :, 31], tokens.float())
    assert torch.equal(value, -key)
    return bytes(tokens.tolist()).decode()


async def consume(url: str) -> int:
    """Return how many entries there were."""
    count = 0
    async with asynckv.connect(url) as peer:
        try:
            while True:
                # An error or a cancellation in this block gives the entry back.
                async with peer.lookup.drop_select() as entry:
                    text = decode(entry)
                count += 1
                mib = entry.nbytes / 2**20
                print(f"consumer: {mib:.0f} MiB for {text[:30]!r}", flush=True)
        except (asynckv.BufferClosed, asynckv.PeerLost) as exc:
            print(f"consumer: no more: {exc}", flush=True)
    return count


async def main(url: str | None) -> None:
    if url is not None:
        await consume(url)
        return
    producer = await asyncio.create_subprocess_exec(
        sys.executable, PRODUCER, "tcp://127.0.0.1:0", stdout=asyncio.subprocess.PIPE
    )
    assert producer.stdout is not None
    serving = (await producer.stdout.readline()).decode()
    count = await consume(serving.split()[-1])
    print((await producer.stdout.read()).decode(), end="")
    assert (count, await producer.wait()) == (8, 0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else None))

"""A toy engine in a process of its own: lines of JSON in, lines of JSON out.

``python -m harness.engines.toy_process SETTINGS``: it prints ``ready``, then
answers requests, each at its own time.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys

import msgspec

from asynckv.config import KVTransferConfig
from asynckv.parallel.shapes import EngineShape
from harness.engines.toy_engine import ToyEngine
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import make_engine

__all__ = ("ToyAnswer", "ToyAsked", "ToySettings", "main")


class ToySettings(msgspec.Struct, frozen=True):
    """What the process is given as its argument."""

    name: str
    config: KVTransferConfig
    shape: EngineShape
    num_blocks: int = 64


class ToyAsked(msgspec.Struct, frozen=True):
    """One request; or, with ``is_abort``, its end."""

    request_id: str
    token_ids: list[int] = []
    max_tokens: int = 1
    kv_transfer_params: dict[str, object] | None = None
    is_abort: bool = False


class ToyAnswer(msgspec.Struct, frozen=True):
    """What it came to. ``digests`` are of the prompt's KV, head by head."""

    request_id: str
    tokens: list[int]
    kv_transfer_params: dict[str, object] | None
    external_tokens: int
    digests: dict[str, str]
    blocks_in_use: int


async def _serve(settings: ToySettings) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    model = ToyModel()
    tasks: dict[str, asyncio.Task[None]] = {}
    engine = make_engine(
        settings.name,
        settings.config,
        settings.shape,
        model,
        num_blocks=settings.num_blocks,
    )
    async with engine:
        _say("ready")
        while line := await reader.readline():
            asked = msgspec.json.decode(line, type=ToyAsked)
            if asked.is_abort:
                tasks[asked.request_id].cancel()
            else:
                answering = _answer(engine, asked)
                tasks[asked.request_id] = asyncio.create_task(answering)


async def _answer(engine: ToyEngine, asked: ToyAsked) -> None:
    digests: dict[str, str] = {}

    def look(block_ids: list[int]) -> None:
        """Digest the caches of all ranks while the request's blocks are its own."""
        for rank in engine.ranks:
            for layer in engine.model.layer_names:
                rows = rank.read(layer, block_ids, len(asked.token_ids)).numpy()
                for place, head in enumerate(rank.heads):
                    data = rows[:, :, place].tobytes()
                    digests[f"{layer}/{head}"] = hashlib.sha256(data).hexdigest()

    output = await engine.generate(
        asked.token_ids,
        asked.max_tokens,
        request_id=asked.request_id,
        kv_transfer_params=asked.kv_transfer_params,
        look=look,
    )
    answer = ToyAnswer(
        asked.request_id,
        output.tokens,
        output.kv_transfer_params,
        output.external_tokens,
        digests,
        engine.blocks_in_use,
    )
    _say(msgspec.json.encode(answer).decode())


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Run until standard input ends."""
    settings = msgspec.json.decode(sys.argv[1], type=ToySettings)
    asyncio.run(_serve(settings))


if __name__ == "__main__":
    main()

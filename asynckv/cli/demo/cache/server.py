"""The server process: a store of little memory and a disk for all engines."""

from __future__ import annotations

import asyncio
import os
import sys

import asynckv
from asynckv.cli.demo.messages import Note, Order, Ready
from asynckv.cli.demo.worker import Stage

__all__ = ("main",)


def main() -> None:
    """Serve at the URL of ``argv``, by its bytes and its disk, until hung up on."""
    url, max_bytes, disk = sys.argv[1:]
    asyncio.run(_serve(Stage(), url, int(max_bytes), disk))


async def _serve(stage: Stage, url: str, max_bytes: int, disk: str) -> None:
    async with (
        asynckv.TieredStore(max_bytes, [disk]) as store,
        asynckv.serve(url, store=store) as server,
    ):
        stage.send(Ready(pid=os.getpid(), url=server.url))
        await stage.perform(_refuse)


async def _refuse(order: Order) -> Note:
    raise ValueError(f"a server of a store does not know {type(order).__name__}")


if __name__ == "__main__":
    main()

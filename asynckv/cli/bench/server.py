"""The serving process that a bench without a URL starts for itself.

It prints its URL, and ends when its standard input does: it never outlives the
bench.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence

from asynckv.cli.bench.child import own_child, until_hung_up
from asynckv.cli.bench.serving import serving
from asynckv.cli.bench.settings import Settings
from asynckv.cli.loops import LoopName, run
from asynckv.links.options import Digest

__all__ = ("main", "own_server")


@contextlib.asynccontextmanager
async def own_server(settings: Settings) -> AsyncIterator[str]:
    """Start a serving process on loopback and yield its URL; end it at the end.

    Of the settings only those that mean something on loopback are passed on.

    :raises asynckv.cli.bench.child.ServerEnded: it could not serve
    """
    lanes = str(settings.lanes or "")
    arguments = ("-m", "asynckv.cli.bench.server", settings.digest, lanes)
    async with own_child(*arguments, settings.loop) as url:
        yield url


async def _serve(settings: Settings) -> None:
    async with serving("tcp://127.0.0.1:0", settings) as url:
        print(url, flush=True)
        await until_hung_up()


def main(arguments: Sequence[str]) -> None:
    """Serve with digest, lanes and loop of ``arguments`` until stdin ends."""
    digests: dict[str, Digest] = {
        "auto": "auto",
        "full": "full",
        "edges": "edges",
        "off": "off",
    }
    loops: dict[str, LoopName] = {
        "auto": "auto",
        "asyncio": "asyncio",
        "uvloop": "uvloop",
    }
    digest, lanes, loop = arguments
    settings = Settings(digest=digests[digest], lanes=int(lanes) if lanes else None)
    run(_serve(settings), loops[loop])


if __name__ == "__main__":
    main(sys.argv[1:])

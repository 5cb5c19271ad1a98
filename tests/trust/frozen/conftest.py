"""A process with many peers in it, each at its own point of its own work.

It is told ``NAME ROLE URL`` a line, does what that role does, and answers ``NAME
ready DETAIL`` where it is to be frozen. After ``NAME go`` it goes on, and the last that
it says is how that ended: ``NAME done`` or ``NAME ErrorName``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias

import pytest

from asynckv.buffers import serve
from asynckv.buffers.remote import connection
from asynckv.links.dial import dial
from asynckv.links.listen import listen
from asynckv.pipes import endpoints as opening
from asynckv.protocol.values import Limits
from asynckv.testing.faults.processes import frozen_peer
from asynckv.testing.pairs import Scheme, new_url
from harness.children import line_of, running, tell

HEARTBEAT_MS: Final = 300
PATIENCE_S: Final = 6.0
PEERS: Final = """
import asyncio, contextlib, json, sys, urllib.parse, socket
import asynckv, torch
from asynckv.security.tls import TLS
from asynckv.tensors.views import spec_of

options = json.loads(sys.argv[1])
if "tls" in options:
    options["tls"] = TLS(**options["tls"])
going = {}

def say(*words):
    print(*words, flush=True)

async def ready(name, detail="-"):
    going[name] = asyncio.Event()
    say(name, "ready", detail)
    await going[name].wait()

def connect(url, reconnect_s=0):
    return asynckv.connect(url, reconnect_s=reconnect_s, **options)

async def holder(name, url):
    async with connect(url, 20) as peer, peer.lookup.drop_select([1]):
        await ready(name)

async def waiter(name, url):
    async with connect(url) as peer:
        waiting = asyncio.create_task(peer.lookup.drop_select([1]))
        await peer.lookup.peek([1])
        await ready(name)
        await waiting

async def reader(name, url):
    async with connect(url) as peer, peer.lookup.open_drop_select([1]) as stream:
        await anext(stream)
        await ready(name)
        async for _ in stream:
            pass

async def writer(name, url):
    half = torch.zeros(100_000)
    specs = {"a.key": spec_of(half), "b.key": spec_of(half)}
    async with connect(url) as peer:
        async with peer.lookup.open_insert([1], None, specs) as writing:
            await writing.put("a.key", half)
            await ready(name)
            await writing.put("b.key", half)

async def inserter(name, url):
    async with connect(url) as peer:
        large = torch.zeros(200_000)
        waiting = asyncio.create_task(
            peer.lookup.insert([2], None, large, None, None)
        )
        await peer.lookup.peek([1])
        await ready(name)
        await waiting

async def server(name, url):
    async with (
        asynckv.LookupBuffer("4MiB", drain_s=0) as lookup,
        asynckv.StoreBuffer("4MiB") as store,
        asynckv.serve(url, lookup=lookup, store=store, **options) as serving,
    ):
        await lookup.insert([1], None, torch.ones(3), None, None)
        await store.put("name", torch.ones(3))
        await ready(name, serving.url)
        await ready(name)

async def sender(name, url):
    async with asynckv.open_pipe(url, **options) as pipe:
        await pipe.send_tensor(torch.zeros(1))
        await ready(name)
        await pipe.send_tensor(torch.ones(1))

async def receiver(name, url):
    async with asynckv.open_pipe(url, max_bytes="1MiB", **options) as pipe:
        await pipe.recv_tensor()
        await ready(name)
        while True:
            await pipe.recv_tensor()

async def stranger(name, url):
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "unix":
        reading, writing = await asyncio.open_unix_connection(parts.path)
    else:
        reading, writing = await asyncio.open_connection(parts.hostname, parts.port)
    await ready(name)
    with contextlib.suppress(ConnectionError):
        await reading.read()
    writing.close()

async def play(name, role, url):
    try:
        await globals()[role](name, url)
        say(name, "done")
    except Exception as exc:
        say(name, type(exc).__name__)

async def main():
    tasks = set()
    say("-", "here")
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, word, *rest = line.split()
        if word == "go":
            going[name].set()
        else:
            tasks.add(asyncio.create_task(play(name, word, *rest)))

asyncio.run(main())
"""

Options: TypeAlias = dict[str, Any]
Case: TypeAlias = Callable[["Stage"], Coroutine[Any, Any, None]]


class Stage:
    """Where one case is played, beside others of the same scheme.

    ``options`` are what ``serve``, ``connect`` and the pipes need for it.
    """

    def __init__(self, name: str, crowd: Crowd) -> None:
        self.options = crowd.options
        self._name = name
        self._crowd = crowd

    def new_url(self) -> str:
        """Return where to serve."""
        return new_url(self._crowd.scheme)

    async def peer(self, role: str, url: str) -> str:
        """Let a peer play ``role`` up to where it is to be frozen."""
        await self._crowd.tell(self._name, role, url)
        word, detail = await self._crowd.hear(self._name)
        assert word == "ready", word
        return detail

    async def freeze(self) -> None:
        """Wait until all cases have come so far, and the process stands still."""
        await self._crowd.ready.wait()
        await self._crowd.frozen.wait()

    async def thaw(self) -> str:
        """Wait until it goes on; return how it ended for the peer."""
        await self._crowd.seen.wait()
        await self._crowd.thawed.wait()
        await self._crowd.tell(self._name, "go")
        return (await self._crowd.hear(self._name))[0]


class Crowd:
    """The process of the peers, and the steps that all cases of an act make together.

    ``longest_s`` is how long it took at most from the moment at which the process
    stood still until every case was at its end.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, scheme: Scheme, options: Options
    ) -> None:
        self.scheme = scheme
        self.options = options
        self.longest_s = 0.0
        self._process = process
        self._received: dict[str, asyncio.Queue[list[str]]] = {}

    async def play(self, cases: Sequence[Case], pause_s: float) -> None:
        """Play cases at once; the process stands still at least for ``pause_s``."""
        self.ready, self.seen = (asyncio.Barrier(len(cases) + 1) for _ in range(2))
        self.frozen, self.thawed = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for case in cases:
                group.create_task(case(Stage(case.__name__, self)), name=case.__name__)
            group.create_task(self._stand_still(pause_s), name="freezing")
        self.longest_s = max(self.longest_s, time.monotonic() - self._frozen_s)

    async def tell(self, *words: str) -> None:
        await tell(self._process, " ".join(words))

    async def hear(self, name: str) -> list[str]:
        return await self._received.setdefault(name, asyncio.Queue()).get()

    async def listen(self) -> None:
        while line := await line_of(self._process):
            name, *words = line.split()
            self._received.setdefault(name, asyncio.Queue()).put_nowait(words)

    async def _stand_still(self, pause_s: float) -> None:
        await self.ready.wait()
        async with frozen_peer(self._process.pid):
            self._frozen_s = time.monotonic()
            self.frozen.set()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(self.seen.wait(), asyncio.sleep(pause_s))
        self.thawed.set()


@contextlib.asynccontextmanager
async def _open_crowd(scheme: Scheme, options: Options) -> AsyncIterator[Crowd]:
    words = dict(options)
    if "tls" in options:
        names = ("certificate", "key", "ca")
        words["tls"] = {x: os.fspath(getattr(options["tls"], x)) for x in names}
    async with running(PEERS, json.dumps(words)) as process:
        crowd = Crowd(process, scheme, options)
        listening = asyncio.create_task(crowd.listen(), name="what the frozen say")
        try:
            await crowd.hear("-")
            yield crowd
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await listening


@pytest.fixture
def open_crowd(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Scheme, Options], AbstractAsyncContextManager[Crowd]]:
    """Open the process of the peers; links here soon miss who stands still."""
    limits = Limits(heartbeat_ms=HEARTBEAT_MS)
    for module in (serve, opening):
        monkeypatch.setattr(module, "listen", functools.partial(listen, limits=limits))
    monkeypatch.setattr(opening, "dial", functools.partial(dial, limits=limits))
    soon = functools.partial(Limits, heartbeat_ms=HEARTBEAT_MS)
    monkeypatch.setattr(connection, "Limits", soon)
    return _open_crowd

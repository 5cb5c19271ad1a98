"""Redis: a value for each part, kept by a real server in between."""

from __future__ import annotations

import asyncio
import shutil
import socket
from asyncio.subprocess import DEVNULL, Process

import redis.asyncio
import redis.exceptions

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import Work

__all__ = ("RedisStore",)

_MGET = 256
_MESSAGE_NBYTES = 2**20
_STOP_GRACE_S = 5.0
_OPTIONS = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
_START_S = 20.0


class RedisStore(Peer):
    """``get`` of a layer at a time; the hop by the server is what its user has."""

    how = "redis.asyncio with hiredis: GET of a layer, MGET of 256 blocks"
    packages = ("redis", "hiredis")
    _server: Process | None = None

    async def serve(self) -> str:
        port = await self._start_server()
        async with redis.asyncio.Redis(host="127.0.0.1", port=port) as client:
            await _wait_for(client)
            for work in self.works:
                for index, view in enumerate(self.pool.views(work)):
                    await client.set(_key(work, index), bytes(view))
        return f"{port} {self._server.pid}" if self._server else ""

    async def connect(self, address: str) -> None:
        port, pid = map(int, address.split())
        self.pids = (pid,)
        self._client = redis.asyncio.Redis(host="127.0.0.1", port=port)

    async def pull(self, work: Work) -> None:
        rows = self.pool.rows(work)
        step = 1 if work.nbytes > _MESSAGE_NBYTES // _MGET else _MGET
        for first in range(0, work.parts, step):
            last = min(first + step, work.parts)
            if step == 1:
                values = [await self._client.get(_key(work, first))]
            else:
                keys = [_key(work, index) for index in range(first, last)]
                values = await self._client.mget(keys)
            for index, value in enumerate(values, first):
                memoryview(rows[index])[:] = value

    async def aclose(self) -> None:
        if self._server is None:
            await self._client.aclose()
        else:
            self._server.terminate()
            try:
                async with asyncio.timeout(_STOP_GRACE_S):
                    await self._server.wait()
            except TimeoutError:
                self._server.kill()
                await self._server.wait()
        await super().aclose()

    async def _start_server(self) -> int:
        program = shutil.which("redis-server")
        if program is None:
            raise FileNotFoundError("redis-server is not on the PATH")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        self._server = await asyncio.create_subprocess_exec(
            program, "--port", str(port), *_OPTIONS, stdout=DEVNULL, stderr=DEVNULL
        )
        return port


def _key(work: Work, index: int) -> str:
    return f"{work.name}/{index}"


async def _wait_for(client: redis.asyncio.Redis) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            try:
                await client.ping()
                return
            except redis.exceptions.ConnectionError:
                await asyncio.sleep(0.05)  # nothing says when it listens

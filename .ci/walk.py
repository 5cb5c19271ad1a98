"""How many files, functions and calls of asynckv one operation enters, on both sides.

Run by a Python that has asynckv. Two processes over loopback; each operation is done
three times, then once under a profile hook in every thread. It measures structure,
not speed. Threads that run already are seen from Python 3.12 on only, so compare
figures of one version.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

import torch

import asynckv

__all__ = ()

PACKAGE = str(Path(asynckv.__file__).parent)
SIZES = {"1 kB": 1_000, "1 MB": 1_000_000}
INLINE = "tcp://127.0.0.1:0?payload=inline"
ROW = "{:26}{:>7}   asking{:>5}{:>6}{:>6}   serving{:>5}{:>6}{:>6}"


class Walked(TypedDict):
    """What one side has entered: files by name, functions and calls by number."""

    files: list[str]
    functions: int
    calls: int


class Hook:
    """Counts the functions of asynckv that are called between start and stop."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, int], int] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            key = (code.co_filename, code.co_qualname, code.co_firstlineno)
            self._calls[key] = self._calls.get(key, 0) + 1

    def start(self) -> None:
        self._calls.clear()
        everywhere = getattr(threading, "setprofile_all_threads", threading.setprofile)
        everywhere(self)
        sys.setprofile(self)

    def stop(self) -> Walked:
        sys.setprofile(None)
        threading.setprofile(None)
        files = sorted({name for name, _, _ in self._calls})
        return Walked(
            files=files, functions=len(self._calls), calls=sum(self._calls.values())
        )


class Other:
    """The serving process: it starts and stops its hook when it is asked to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.urls = self._read()

    def ask(self, word: str) -> Any:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


async def serve() -> None:
    """Serve a buffer and echo a pipe until the other side ends this process."""
    hook, loop = Hook(), asyncio.get_running_loop()
    async with (
        asynckv.LookupBuffer("1GiB") as buffer,
        asynckv.listen_pipe(INLINE) as listener,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
    ):
        print(json.dumps([server.url, listener.url]), flush=True)
        echoing = asyncio.create_task(echo(listener))
        while word := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if word == "start":
                hook.start()
            print(json.dumps(hook.stop() if word == "stop" else None), flush=True)
        echoing.cancel()


async def echo(listener: Any) -> None:
    """Send back what comes by the first pipe."""
    pipe = await listener.accept()
    async for tensor in pipe:
        await pipe.send_tensor(tensor)


async def walk(
    other: Other, name: str, operation: Callable[[int], Awaitable[object]]
) -> None:
    """Print what the fourth call of ``operation`` enters here and over there."""
    hook = Hook()
    for number in range(3):
        await operation(number)
    other.ask("start")
    hook.start()
    await operation(3)
    await asyncio.sleep(0.2)  # what follows an answer, as an acknowledgement, is seen
    mine, theirs = hook.stop(), other.ask("stop")
    figures = [
        figure
        for side in (mine, theirs)
        for figure in (len(side["files"]), side["functions"], side["calls"])
    ]
    print(ROW.format(name, len({*mine["files"], *theirs["files"]}), *figures))


async def measure(other: Other) -> None:
    """Walk every operation."""
    print(ROW.format("", "files", *("files", "func.", "calls") * 2))
    lookup_url, pipe_url = other.urls
    for payload in ("inline", "map"):
        async with asynckv.connect(f"{lookup_url}?payload={payload}") as peer:
            for size, nbytes in SIZES.items():
                value = torch.ones(nbytes, dtype=torch.uint8)

                async def insert(n: int, value: torch.Tensor = value) -> None:
                    await peer.lookup.insert([n, len(value)], None, value, None, None)

                async def select(n: int, nbytes: int = nbytes) -> None:
                    async with peer.lookup.drop_select([n, nbytes]):
                        pass

                if payload == "inline":
                    await walk(other, f"insert, {size}, {payload}", insert)
                else:
                    await asyncio.gather(*map(insert, range(4)))
                await walk(other, f"drop_select, {size}, {payload}", select)
    async with asynckv.open_pipe(pipe_url) as pipe:
        for size, nbytes in SIZES.items():
            sent = torch.ones(nbytes, dtype=torch.uint8)

            async def there_and_back(_: int, sent: torch.Tensor = sent) -> None:
                await pipe.send_tensor(sent)
                await pipe.recv_tensor()

            await walk(other, f"pipe and back, {size}", there_and_back)


def main() -> None:
    """Print a row for each operation."""
    if "--serve" in sys.argv:
        asyncio.run(serve())
        return
    other = Other()
    try:
        asyncio.run(measure(other))
    finally:
        other.end()


if __name__ == "__main__":
    main()

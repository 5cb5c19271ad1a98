from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asynckv
from asynckv import KVPipe
from asynckv.testing.blocked import until
from asynckv.testing.pairs import free_port, open_pipe_pair
from harness.forks import ForkServer

PAGE = (Path(__file__).parents[1] / "docs" / "pipes.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
KV = torch.arange(2**18).float()


def snippet_with(words: str) -> str:
    (snippet,) = (text for text in SNIPPETS if words in text)
    return str(snippet)


async def run(words: str, **names: Any) -> list[str]:
    """Run the snippet of the page that has ``words``; return what it prints."""
    printed: list[str] = []

    def note(*shown: object) -> None:
        printed.append(" ".join(map(str, shown)))

    given = {"asynckv": asynckv, "asyncio": asyncio, "kv": KV, "print": note, **names}
    head = f"async def snippet({', '.join(given)}):\n"
    made: dict[str, Any] = {}
    exec(head + textwrap.indent(snippet_with(words), "    "), made)  # noqa: S102
    await made["snippet"](**given)
    return printed


async def nothing(far: KVPipe) -> None:
    """The far side only keeps what comes."""


async def receives(far: KVPipe) -> None:
    received = await far.recv_tensor()
    assert received is not None and received.equal(KV)


async def sends_more(far: KVPipe) -> None:
    for tensor in (None, KV, torch.tensor([7]), None):
        await far.send_tensor(tensor)
    await far.aclose()


async def leaves(far: KVPipe) -> None:
    await far.send_tensor(torch.tensor([7]))
    await far.aclose()


async def fails(far: KVPipe) -> None:
    far.abort()


Far = Callable[[KVPipe], Awaitable[None]]
WITH_A_PIPE: dict[tuple[str, Far], list[str]] = {
    ("a value like any other", nothing): [],
    ("copy=False", receives): [],
    ("pipe.empty(", receives): [],
    ("recv_tensor(into=cache)", sends_more): ["tensor([7])", "None"],
    ("asyncio.timeout", nothing): [],
    ("that was all", leaves): ["tensor([7])", "that was all"],
    ("that was all", fails): ["the other side failed: this is not all"],
    ("send again", nothing): [],
    ("pipe.statistics()", nothing): ["0 0 0 0", "ID inline"],
}
OPENS = "as pipe:\n    await pipe.send_tensor(kv)"
BY_THEMSELVES = ("asyncio.run", "listener.url)  #", OPENS, "join_group(")


def test_every_snippet_of_the_page_is_run() -> None:
    run_here = [words for words, _ in WITH_A_PIPE] + [*BY_THEMSELVES]
    assert {snippet_with(words) for words in run_here} == set(SNIPPETS)


@pytest.mark.parametrize(("snippet", "shown"), WITH_A_PIPE.items())
async def test_a_snippet_does_what_it_says(
    snippet: tuple[str, Far], shown: list[str]
) -> None:
    words, far_side = snippet
    async with open_pipe_pair() as (pipe, far):
        name = pipe.peer
        acting = asyncio.ensure_future(far_side(far))
        printed = await run(words, pipe=pipe, cache=torch.empty_like(KV))
        await acting
        assert [line.replace(name, "ID") for line in printed] == shown


async def test_the_snippet_about_a_lost_peer_says_what_to_send_again() -> None:
    async with open_pipe_pair(max_bytes=2**30) as (pipe, far):
        await pipe.send_tensor(None)
        far.abort()
        (said,) = await run("send again", pipe=pipe)
        assert re.fullmatch(r"send again: \d tensors may be there or not", said)


async def test_the_snippets_that_listen_and_open_meet() -> None:
    urls: list[str] = []
    listening = asyncio.create_task(run("listener.url)  #", print=urls.append))
    await until(lambda: bool(urls))
    await run(OPENS, url=urls[0])
    await listening


async def test_the_ranks_of_the_snippet_meet() -> None:
    port = free_port()
    ranks = (run("join_group(", rank=rank, port=port) for rank in range(2))
    await asyncio.gather(*ranks)


@pytest.mark.multiprocess
async def test_the_whole_program_on_the_page_runs(forks: ForkServer) -> None:
    shown = "".join(f"torch.Size([2, 4]) {layer}\n" for layer in range(3))
    assert await forks.printed_by(snippet_with("asyncio.run")) == shown

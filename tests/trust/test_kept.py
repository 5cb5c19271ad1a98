"""What requests of a peer make a server keep, by the size of its process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import asynckv
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import Insert, OpeningFrame, Peek, Result, Select
from asynckv.protocol.values import Limits
from asynckv.testing.faults.hostile import HostilePeer, claim, open_hostile_peer
from harness.children import ask, line_of, running

pytestmark = [
    pytest.mark.trust,
    pytest.mark.alone,
    pytest.mark.multiprocess,
    pytest.mark.timeout(300),
]

MIB = 2**20
BUFFER_BYTES = 16 * MIB
WAITING_BYTES = 32 * MIB
SPARE_BYTES = 64 * MIB
COUNT = 30
BODY_BYTES = 12 * MIB
HALF_BODIES = 25
SLOW_BYTES = MIB // 4
TOKENS = tuple(range(BODY_BYTES // 8))
SERVER = f"""
import asyncio, sys, torch, asynckv
async def main():
    async with (
        asynckv.LookupBuffer({BUFFER_BYTES}, drain_s=0) as lookup,
        asynckv.serve(
            "tcp://127.0.0.1:0", lookup=lookup, max_waiting_bytes={WAITING_BYTES}
        ) as server,
    ):
        full = torch.zeros({BUFFER_BYTES - 8}, dtype=torch.uint8)
        await lookup.insert([9], None, full, None, None)
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(server.waiting_bytes, flush=True)
asyncio.run(main())
"""


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def queries() -> list[tuple[OpeningFrame, bytes]]:
    key = bytes(BODY_BYTES - 8)
    select = Select(has_key=True)
    return [(select, (n + 1).to_bytes(8, "little") + key) for n in range(COUNT)]


def inserts() -> list[tuple[OpeningFrame, bytes]]:
    body = claim(8, tokens=TOKENS)
    return [(Insert(f"{n}", 2 * n + 1, inline=False), body) for n in range(COUNT)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("requests", [queries, inserts])
async def test_requests_that_wait_make_a_server_keep_no_more_than_it_was_told(
    requests: Callable[[], Sequence[tuple[OpeningFrame, bytes]]],
    figures: Callable[[str], None],
) -> None:
    asked = requests()
    async with running(SERVER) as process:
        url = await line_of(process)
        before = resident_bytes(process.pid)
        async with open_hostile_peer(url, limits=Limits()) as peer:
            for number, (frame, body) in enumerate(asked):
                await peer.send(2 * number + 1, frame, body)
            kept = int(await ask(process, "how much?"))
            growth = resident_bytes(process.pid) - before
    figures(
        f"{COUNT} {requests.__name__} of {BODY_BYTES // MIB} MiB: {kept / MIB:.0f} MiB "
        f"kept, the server grew by {growth / MIB:.0f} MiB"
    )
    assert BODY_BYTES <= kept <= WAITING_BYTES
    assert growth <= WAITING_BYTES + SPARE_BYTES


async def begin_a_body(
    url: str, stack: contextlib.AsyncExitStack, frame: OpeningFrame, nbytes: int
) -> tuple[HostilePeer, bytes]:
    """Send all of a request but its end, over a link of its own; return the end."""
    peer = await stack.enter_async_context(open_hostile_peer(url, limits=Limits()))
    *parts, rest = encode_frame(1, frame, bytes(nbytes))
    await peer.control.send(b"".join(parts))
    return peer, rest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_requests_that_are_never_whole_make_a_server_keep_no_more_either(
    figures: Callable[[str], None],
) -> None:
    async with running(SERVER) as process, contextlib.AsyncExitStack() as stack:
        url = await line_of(process)
        before = resident_bytes(process.pid)
        slow, rest = await begin_a_body(url, stack, Peek(has_key=True), SLOW_BYTES)
        for _ in range(HALF_BODIES):
            await begin_a_body(url, stack, Select(has_key=True), BODY_BYTES)
        async with asynckv.connect(url) as honest:  # its query is as long as they are
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await honest.lookup.drop_select(TOKENS)
            assert honest.is_connected
        growth = resident_bytes(process.pid) - before
        await slow.control.send(rest)  # it began before them, but with little
        assert (await slow.expect(Result)).value == 0
    figures(
        f"{HALF_BODIES} links with {BODY_BYTES // MIB} MiB of a request that is not "
        f"whole: the server grew by {growth / MIB:.0f} MiB"
    )
    assert growth <= WAITING_BYTES + SPARE_BYTES

"""What is sent without a copy: lent by the caller, or memory of the pipe's own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Final

import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.errors import EndOfStream, PeerLost, PipeBroken
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.options import Digest
from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing import CancelMode, Outcome, sweep_cancellation, until
from asynckv.testing.blocked import until_blocked
from asynckv.testing.expectations import expect_same, is_same, noise
from asynckv.testing.pairs import SCHEMES, Scheme, open_pipe_pair
from asynckv.testing.pipe_checks import LARGE, PIPE_BYTES, receive_many, send_many
from asynckv.transports.inline import InlineTransport

pytestmark = pytest.mark.both_loops


LONG: Final = 2**25
OVER_SOCKETS: Final[tuple[Scheme, ...]] = ("tcp", "unix")


def is_read(pipe: Pipe) -> bool:
    """Is a lane of this side at any of its first transfers?"""
    payload = pipe._link.payload
    assert isinstance(payload, InlineTransport)
    return any(payload._lanes.is_touched(transfer) for transfer in range(20))


async def is_first_or_lost(pipe: Pipe, first: torch.Tensor) -> None:
    """What comes is as it was lent, or does not come."""
    with contextlib.suppress(PeerLost, EndOfStream):
        expect_same(await pipe.recv_tensor(), first)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_what_is_lent_arrives_and_is_the_callers_after_a_flush(
    scheme: Scheme,
) -> None:
    plain = noise(LARGE, 1)
    tensors = [
        plain,
        plain[:64],
        plain[::2],
        plain.view(torch.bfloat16).view(2, -1),
        plain.view(2, -1).t(),
        torch.ones(LARGE // 4, requires_grad=True),
    ]
    async with open_pipe_pair(scheme, max_bytes="16MiB") as (near, far):
        for tensor in tensors:
            await near.send_tensor(tensor, copy=False)
        await near.flush()
        before = [tensor.detach().clone() for tensor in tensors]
        plain.zero_()
        for tensor in before:
            expect_same(await far.recv_tensor(), tensor)


@pytest.mark.parametrize("scheme", OVER_SOCKETS)
async def test_what_is_lent_is_not_copied(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        for _ in range(4):
            await near.send_tensor(noise(LARGE, 0))
        await near.flush()
        lent = noise(LARGE, 1)
        await near.send_tensor(lent, copy=False)  # for which the peer has no room yet
        lent.fill_(7)
        for _ in range(4):
            await far.recv_tensor()
        expect_same(await far.recv_tensor(), torch.full_like(lent, 7))


async def test_in_one_process_what_is_lent_is_copied_all_the_same() -> None:
    async with open_pipe_pair("mem") as (near, far):
        lent = noise(LARGE, 1)
        await near.send_tensor(lent, copy=False)
        lent.fill_(7)
        expect_same(await far.recv_tensor(), noise(LARGE, 1))


@pytest.mark.parametrize("filled", [0, 8])
@pytest.mark.parametrize("nbytes", [64, LARGE])
async def test_a_cancelled_send_has_lent_nothing(filled: int, nbytes: int) -> None:
    source, room = noise(nbytes, 1), list[asyncio.Task[None]]()
    async with open_pipe_pair("unix") as (near, far):

        async def before() -> None:
            source.copy_(noise(nbytes, 1))
            await send_many(near, filled)
            if filled:  # room comes while the send waits for it
                room.append(asyncio.create_task(receive_many(far, filled)))

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            if outcome.cancelled:
                source.fill_(0)
            if room:
                await room.pop()
            await near.send_tensor(None)
            if not outcome.cancelled:
                expect_same(await far.recv_tensor(), noise(nbytes, 1))
            assert await far.recv_tensor() is None
            await near.flush()
            assert near.statistics().in_flight_bytes == 0

        await sweep_cancellation(
            lambda: near.send_tensor(source, copy=False), check, before=before
        )


@pytest.mark.parametrize(
    ("call", "scheme"), [*(("flush", one) for one in OVER_SOCKETS), ("aclose", "unix")]
)
async def test_a_cancelled_call_leaves_nothing_that_reads_what_was_lent(
    call: str, scheme: Scheme
) -> None:
    stack: list[contextlib.AsyncExitStack] = []
    pairs: list[tuple[Pipe, Pipe]] = []
    source, first = noise(LONG, 1), noise(LONG, 1)

    async def before() -> None:
        source.copy_(first)
        stack.append(contextlib.AsyncExitStack())
        pair = open_pipe_pair(scheme, max_bytes=4 * LONG)
        pairs.append(await stack[-1].enter_async_context(pair))
        await pairs[-1][0].send_tensor(source, copy=False)

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        near, far = pairs[-1]
        if not k:  # a task that was cancelled before it began has done nothing
            await getattr(near, call)()
        assert not is_read(near)
        source.fill_(0)
        if k and outcome.cancelled:
            await is_first_or_lost(far, first)
        else:
            expect_same(await far.recv_tensor(), first)
        near.abort()
        await stack.pop().aclose()

    await sweep_cancellation(
        lambda: getattr(pairs[-1][0], call)(), check, before=before
    )


async def test_a_flush_that_is_cancelled_when_all_has_left_loses_nothing() -> None:
    async with open_pipe_pair() as (near, far):
        await near.send_tensor(noise(LARGE, 1), copy=False)
        await near.flush()
        await near.send_tensor(noise(LARGE, 2))

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            await near.send_tensor(None)

        await sweep_cancellation(near.flush, check)
        await near.flush()
        for seed in (1, 2):
            expect_same(await far.recv_tensor(), noise(LARGE, seed))


@pytest.mark.parametrize("scheme", OVER_SOCKETS)
@pytest.mark.parametrize("end", ["abort", "aclose", "lost"])
async def test_after_any_end_nothing_reads_what_was_lent(
    scheme: Scheme, end: str
) -> None:
    source, first = noise(LONG, 1), noise(LONG, 1)
    async with open_pipe_pair(scheme, max_bytes=4 * LONG) as (near, far):
        for _ in range(3):
            await near.send_tensor(source, copy=False)
        await until(lambda: is_read(near))
        if end == "aclose":
            await near.aclose()
        elif end == "abort":
            near.abort()
        else:
            far.abort()
            with pytest.raises(PipeBroken):
                await near.flush()
        assert not is_read(near)
        source.fill_(0)
        if end != "lost":
            await is_first_or_lost(far, first)


needs_files = pytest.mark.skipif(not has_fd_sockets(), reason="no memory files here")

EVERY: Final = [*SCHEMES, "map"]


async def filled(pipe: Pipe, seed: int = 1) -> torch.Tensor:
    """Return a filled tensor of the pipe's own, once it has memory."""
    while True:
        tensor = pipe.empty((LARGE,), torch.uint8)
        if pipe._outbound.region_of(tensor) is not None:
            return tensor.copy_(noise(LARGE, seed))
        await until(lambda: pipe._outbound._memory._growing is None)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Pipe, Pipe]]:
    async with open_pipe_pair("map") as pair:
        yield pair


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each pool has copied, in the order of the calls."""
    sizes, copy = list[int](), CopyPool.copy

    async def noted(
        pool: CopyPool, sources: list[torch.Tensor], *rest: object, **options: object
    ) -> object:
        sizes.extend(source.nbytes for source in sources)
        return await copy(pool, sources, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(CopyPool, "copy", noted)
    return sizes


@needs_files
@pytest.mark.parametrize("scheme", EVERY)
async def test_what_was_filled_arrives_and_may_be_filled_again(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        tensor = await filled(near)
        for seed in range(3):
            tensor.copy_(noise(LARGE, seed))
            await near.send_tensor(tensor)
            await near.flush()
            assert is_same(await far.recv_tensor(), noise(LARGE, seed))


@needs_files
@pytest.mark.parametrize("digest", ["auto", "full", "off"])
async def test_by_map_only_the_receiver_copies(
    digest: Digest, copied: list[int]
) -> None:
    async with open_pipe_pair("map", digest=digest) as (near, far):
        tensor, into = await filled(near), torch.empty(LARGE, dtype=torch.uint8)
        receiving = asyncio.create_task(far.recv_tensor(into))
        await until_blocked(receiving)
        await near.send_tensor(tensor)
        await receiving
        assert copied == [LARGE] and is_same(into, noise(LARGE, 1))
        assert near.transport == "map"


@needs_files
@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_by_sockets_nobody_copies(scheme: Scheme, copied: list[int]) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        await near.send_tensor(await filled(near))
        assert is_same(await far.recv_tensor(), noise(LARGE, 1))
        assert not copied


@needs_files
async def test_what_is_read_still_is_not_shown_a_second_time(
    pair: tuple[Pipe, Pipe], copied: list[int]
) -> None:
    near, far = pair
    tensor = await filled(near)
    for _ in range(3):
        await near.send_tensor(tensor)
    for _ in range(3):
        assert is_same(await far.recv_tensor(), noise(LARGE, 1))
    assert near.transport == far.transport == "map"


@needs_files
async def test_a_part_of_it_is_copied_as_any_other_tensor(
    pair: tuple[Pipe, Pipe],
) -> None:
    near, far = pair
    tensor = await filled(near)
    for part in (tensor[: LARGE // 2], tensor[::2], tensor.view(2, -1).t()):
        expected = part.clone()
        await near.send_tensor(part)
        part.zero_()
        assert is_same(await far.recv_tensor(), expected)
        tensor.copy_(noise(LARGE, 1))


@needs_files
@pytest.mark.parametrize("scheme", ["tcp", "map"])
async def test_memory_is_nobody_elses_before_it_was_sent(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        for seed in range(4):
            await near.send_tensor(await filled(near, seed))  # and nobody keeps it
        await send_many(near, 2)
        for seed in (0, 1, 2, 3, 0, 1):
            assert is_same(await far.recv_tensor(), noise(LARGE, seed))


@needs_files
async def test_the_bound_counts_what_lives(pair: tuple[Pipe, Pipe]) -> None:
    near, far = pair
    tensors = [await filled(near) for _ in range(PIPE_BYTES // LARGE)]
    more = near.empty((LARGE,), torch.uint8)
    assert near._outbound.region_of(more) is None
    await near.send_tensor(more.copy_(noise(LARGE, 5)))  # copied, as any other
    more.zero_()
    assert is_same(await far.recv_tensor(), noise(LARGE, 5))
    tensors.clear()
    gc.collect()
    await filled(near)


@needs_files
async def test_it_takes_room_in_flight_as_any_tensor_does() -> None:
    async with open_pipe_pair("tcp", max_bytes=2 * LARGE) as (near, far):
        await send_many(near, 4)  # two of them are in the memory of the far side
        tensor = near.empty((LARGE,), torch.uint8).copy_(noise(LARGE, 4))
        sending = asyncio.create_task(near.send_tensor(tensor))
        await until_blocked(sending)
        assert near.statistics().in_flight_bytes == 2 * LARGE
        assert near.statistics().waiting_senders == 1
        await receive_many(far, 4)
        await sending
        assert is_same(await far.recv_tensor(), noise(LARGE, 4))


@needs_files
@pytest.mark.parametrize("scheme", ["tcp", "map"])
async def test_a_cancelled_send_of_it_has_sent_nothing(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme, digest="full") as (near, far):
        tensor = await filled(near)

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            await near.send_tensor(None)
            if not outcome.cancelled:
                expect_same(await far.recv_tensor(), noise(LARGE, 1))
            assert await far.recv_tensor() is None
            await near.flush()
            assert near.statistics().in_flight_bytes == 0

        await sweep_cancellation(lambda: near.send_tensor(tensor), check)


@needs_files
async def test_a_lost_map_brings_it_by_sockets(pair: tuple[Pipe, Pipe]) -> None:
    near, far = pair
    mapping = near._sends._mapping
    assert mapping is not None
    await near.send_tensor(await filled(near))
    mapping.lose("a test")
    await near.send_tensor(await filled(near, 2))
    assert is_same(await far.recv_tensor(), noise(LARGE, 1))
    assert is_same(await far.recv_tensor(), noise(LARGE, 2))


@needs_files
async def test_small_ones_and_those_of_a_closed_pipe_are_ordinary_tensors() -> None:
    async with (
        listen_pipe("tcp://127.0.0.1:0") as listener,
        open_pipe(listener.url) as near,
        await listener.accept() as far,
    ):
        small = near.empty((2, 3), torch.float32).fill_(4)
        await near.send_tensor(small)
        assert is_same(await far.recv_tensor(), torch.full((2, 3), 4.0))
    tensor = near.empty((LARGE,), torch.uint8)
    assert near._outbound.region_of(tensor) is None
    with pytest.raises((EndOfStream, PeerLost)):
        await near.send_tensor(tensor)


@needs_files
async def test_a_dtype_that_cannot_be_sent_is_refused(pair: tuple[Pipe, Pipe]) -> None:
    with pytest.raises(ValueError, match="bits16"):
        pair[0].empty((2,), torch.bits16)

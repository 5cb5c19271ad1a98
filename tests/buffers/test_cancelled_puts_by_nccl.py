"""What a peer on one GPU puts into buffers on another one, cancelled anywhere."""

from __future__ import annotations

import torch

from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.gpu_puts import LAYERS, check_is_in
from harness.nccl_buffer_pairs import NcclBuffers


async def test_a_cancelled_insert_leaves_no_trace_on_either_gpu(
    nccl_pair: NcclBuffers,
) -> None:
    tensor = nccl_pair.theirs.tensor
    key, hidden = tensor(noise(MIB, 1)), tensor(noise(8))
    entries = nccl_pair.buffer.ledger.table.entries

    async def before() -> None:
        key.as_subclass(torch.Tensor).copy_(noise(MIB, 1))

    async def check(k: int, mode: CancelMode, outcome: Outcome[str]) -> None:
        key.fill_(0)
        await nccl_pair.peer.lookup.peek([1])  # all that was said before is heard
        await until(lambda: not coming(nccl_pair))
        assert entries or outcome.cancelled
        if entries:
            await check_is_in(nccl_pair)
        await nccl_pair.emptied()

    lookup = nccl_pair.peer.lookup
    # Cancelled again while what has left is digested, or is waited for.
    modes: tuple[CancelMode, ...] = ("task", "scope", "again")
    await sweep_cancellation(
        lambda: lookup.insert([1], None, key, None, hidden),
        check,
        before=before,
        modes=modes,
    )
    assert nccl_pair.has_put and nccl_pair.peer.transport == "nccl"


def coming(pair: NcclBuffers) -> int:
    every = [services.lookup for services in pair.server._services]
    return sum(len(lookup.tasks) for lookup in every if lookup is not None)


async def test_a_cancelled_put_of_a_layer_may_be_made_again(
    nccl_pair: NcclBuffers,
) -> None:
    source = nccl_pair.theirs.tensor(noise(MIB, 3))
    async with nccl_pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        is_put = False

        async def put() -> None:
            if not is_put:
                await writer.put("key", source)

        async def before() -> None:
            source.as_subclass(torch.Tensor).copy_(noise(MIB, 3))

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            nonlocal is_put
            source.fill_(0)
            is_put = not outcome.cancelled

        modes: tuple[CancelMode, ...] = ("task", "completion")
        await sweep_cancellation(put, check, before=before, modes=modes)
        await writer.put("hidden", noise(8))
    assert nccl_pair.peer.transport == "nccl"
    await check_is_in(nccl_pair, 3)


async def test_memory_of_the_host_is_quiet_when_a_cancelled_insert_ends(
    nccl_pair: NcclBuffers,
) -> None:
    tensor = nccl_pair.theirs.tensor
    key, value = tensor(noise(MIB, 1)), noise(MIB, 2)

    async def before() -> None:
        value.copy_(noise(MIB, 2))

    async def check(k: int, mode: CancelMode, outcome: Outcome[str]) -> None:
        value.fill_(0)
        await nccl_pair.peer.lookup.peek([1])
        await until(lambda: not coming(nccl_pair))
        if nccl_pair.buffer.ledger.table.entries:
            entry = await nccl_pair.buffer.drop_select([1])
            assert isinstance(entry.value, torch.Tensor)
            assert is_same(entry.value, noise(MIB, 2))
            del entry
        await nccl_pair.emptied()

    lookup = nccl_pair.peer.lookup
    await sweep_cancellation(
        *(lambda: lookup.insert([1], None, key, value, None), check),
        before=before,
        modes=("task", "again"),
    )

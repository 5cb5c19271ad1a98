"""The case of a prefill that sends each layer while it computes the next one.

What counts is the tail: from the last layer's end of compute until the entry is
committed in the other process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from asynckv.cli.bench.measuring import Case, Sample
from asynckv.cli.bench.memory import Memory, make_memory
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import Rig
from asynckv.tensors.blocks import spec_in

__all__ = ("open_tail",)


@contextlib.asynccontextmanager
async def open_tail(
    rig: Rig, subject: Subject, compute_s: float
) -> AsyncIterator[Case]:
    """Yield the case; a layer's compute is pretended by waiting ``compute_s``.

    No transfer can beat one raw layer, which is the first baseline; the second
    is asynckv itself, with the whole entry inserted after the compute.
    """
    memory = await rig.in_thread(make_memory, subject.parts, subject.part_nbytes)
    views = memory.source_views

    async def raw() -> Sample:
        elapsed_s = await rig.in_thread(rig.raw.push, views[:1])
        return Sample(elapsed_s * 1e3, views[0].nbytes)

    yield Case(
        ours=lambda: _send_by_layer(rig, memory, compute_s),
        baselines={
            "one layer over raw TCP": raw,
            "asynckv in bulk": lambda: _send_in_bulk(rig, memory),
        },
    )


async def _send_by_layer(rig: Rig, memory: Memory, compute_s: float) -> Sample:
    specs = {f"{name}.key": spec_in(one) for name, one in memory.layers.items()}
    tokens = rig.new_tokens()
    async with rig.lookup.open_insert(tokens, None, specs) as writer:
        async with asyncio.TaskGroup() as group:
            for name, layer in memory.layers.items():
                await asyncio.sleep(compute_s)
                computed_s = time.perf_counter()
                group.create_task(writer.put(f"{name}.key", layer))
    tail_s = time.perf_counter() - computed_s
    await rig.lookup.withdraw(writer.entry_id)
    return Sample(tail_s * 1e3, memory.nbytes)


async def _send_in_bulk(rig: Rig, memory: Memory) -> Sample:
    tokens = rig.new_tokens()
    began_s = time.perf_counter()
    entry_id = await rig.lookup.insert(tokens, None, memory.layers, None, None)
    elapsed_s = time.perf_counter() - began_s
    await rig.lookup.withdraw(entry_id)
    return Sample(elapsed_s * 1e3, memory.nbytes)

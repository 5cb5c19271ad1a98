"""From the bytes of a leased entry to tensors that are the consumer's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import torch

from asynckv.abc import KVEntry
from asynckv.buffers.entries.entries import Lease
from asynckv.devices.arena import place_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import LeaseLost
from asynckv.tensors.arena import Region
from asynckv.tensors.blocks import (
    KVMemory,
    tensor_at,
)
from asynckv.tensors.runs import Runs
from asynckv.transfers.layout import unflatten
from asynckv.transfers.targets import Part, match_targets
from asynckv.transfers.tokens import tensor_of

__all__ = (
    "build_entry",
    "hand_over",
    "lend",
    "tensors_of",
    "view_of",
)

_AT_A_TIME: Final = 16
"""Views of an arena's memory take their time to be made: 40 us, on the loop."""

_Held: TypeAlias = tuple[Part, Region]


async def hand_over(
    lease: Lease, pool: CopyPool, targets: Mapping[str, KVMemory]
) -> KVEntry:
    """Make the entry the consumer's own, just before it is acknowledged.

    Where this is the entry's last delivery its memory itself changes hands, unless
    somebody else has a view of it; the rest, and what is named in ``targets``, is
    copied. If the lease was lost meanwhile, what is returned is of no use.
    """
    if lease.entry.deliveries_left > 1:
        return await lend(lease, pool, targets)
    named, own, others = dict[str, torch.Tensor](), list[Region](), list[_Held]()
    for index, (part, region) in enumerate(_held(lease.entry.parts), 1):
        if part.name not in targets and region.can_change_hands():
            # What lies apart is copied when the process may have no more mappings.
            with contextlib.suppress(OSError):
                named[part.name] = region.tensor(part.spec)
                own.append(region)
        if part.name not in named:
            others.append((part, region))
        if not index % _AT_A_TIME:
            await asyncio.sleep(0)
    copies = await _copies(lease, pool, targets, others)
    if lease.is_valid:
        for region in own:
            region.hand_out()
    return build_entry(lease, named | copies)


async def lend(
    lease: Lease, pool: CopyPool, targets: Mapping[str, KVMemory]
) -> KVEntry:
    """Copy the entry out; whatever is done to the copies, it can be given back."""
    held = _held(lease.entry.parts)
    return build_entry(lease, await _copies(lease, pool, targets, held))


async def tensors_of(
    parts: list[Part], pool: CopyPool, targets: Mapping[str, KVMemory]
) -> list[torch.Tensor]:
    """Copy some landed parts out, into ``targets`` where they are named there."""
    return await _copied(_held(parts), pool, targets)


def view_of(part: Part) -> torch.Tensor:
    """Return a landed part where it lies: nobody may write to it."""
    ((_, region),) = _held([part])
    return region.tensor(part.spec)


async def _copied(
    held: Sequence[_Held], pool: CopyPool, targets: Mapping[str, KVMemory]
) -> list[torch.Tensor]:
    sources, places = list[torch.Tensor | Runs | DeviceMemory](), list[KVMemory]()
    for index, (part, region) in enumerate(held):
        if index and not index % _AT_A_TIME:
            await asyncio.sleep(0)
        sources.append(place_of(region, part.spec))
        into = targets.get(part.name)
        places.append(pool.empty(part.spec) if into is None else into)
    copying = pool.copy(sources, places, digest=False)
    del sources  # an error's traceback would keep the memory in use
    await copying
    return [tensor_at(place) for place in places]


def build_entry(lease: Lease, named: Mapping[str, torch.Tensor]) -> KVEntry:
    """Put tensors in their fields, in the order in which they were inserted."""
    entry = lease.entry
    key, value, hidden, extras = unflatten(
        [(part.name, named[part.name]) for part in entry.parts]
    )
    return KVEntry(
        input_tokens=tensor_of(entry.input_tokens),
        roi=tensor_of(entry.roi),
        key=key,
        value=value,
        hidden=hidden,
        extras=extras,
        entry_id=entry.entry_id,
        matched_tokens=lease.matched_tokens,
        attempt=lease.attempt,
    )


async def _copies(
    lease: Lease,
    pool: CopyPool,
    targets: Mapping[str, KVMemory],
    held: Sequence[_Held],
) -> dict[str, torch.Tensor]:
    match_targets({part.name: part.spec for part in lease.entry.parts}, targets)
    tensors = await _copied(held, pool, targets)
    return {part.name: t for (part, _), t in zip(held, tensors, strict=True)}


def _held(parts: Sequence[Part]) -> list[_Held]:
    """Return parts and where they are; a region that is released is scratch memory."""
    held = [(part, part.region) for part in parts if part.region is not None]
    if len(held) < len(parts):
        raise LeaseLost("the entry was taken back while it was read")
    return held

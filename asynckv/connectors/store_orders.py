"""What the scheduler side of a store connector tells its workers."""

from __future__ import annotations

import msgspec

from asynckv.abc import BlockIds, KVConnectorMetadata

__all__ = ("StoreMetadata", "StoreOrder")


class StoreOrder(msgspec.Struct, frozen=True):
    """Load or save these blocks, of which each group has one for each key.

    They are those of the prompt from ``first_block`` on.
    """

    request_id: str
    block_keys: tuple[str, ...]
    block_ids: BlockIds
    first_block: int = 0


class StoreMetadata(KVConnectorMetadata, frozen=True):
    """One step's orders. ``aborts`` are requests whose loads end as soon as can be."""

    loads: tuple[StoreOrder, ...] = ()
    saves: tuple[StoreOrder, ...] = ()
    aborts: tuple[str, ...] = ()

"""What the scheduler side of a peer-to-peer connector tells its workers."""

from __future__ import annotations

import msgspec

from asynckv.abc import BlockIds, KVConnectorMetadata
from asynckv.parallel.shapes import EngineShape

__all__ = ("LoadOrder", "P2PMetadata", "SaveOrder")


class LoadOrder(msgspec.Struct, frozen=True):
    """Fill ``block_ids`` from a transfer, beginning with its block ``first_block``.

    The transfer's prompt must begin with the ``num_tokens`` tokens of this ``digest``,
    and must have been computed with the same ``salt`` (see :class:`EntryHeader`).
    Without blocks nothing is loaded or reported: the producer of that prompt learns
    that nobody needs it. ``shape`` is how its engine says its KV is cut.
    ``is_async``: between steps; else the next forward waits for it, layer by layer.
    With a ``refusal`` nothing is asked for: the load fails at once, for that reason.
    """

    request_id: str
    transfer_id: str
    peer: str
    block_ids: BlockIds
    first_block: int = 0
    num_tokens: int = 0
    digest: bytes = b""
    incarnations: tuple[str, ...] = ()
    shape: EngineShape | None = None
    is_async: bool = True
    salt: bytes = b""
    refusal: str = ""


class SaveOrder(msgspec.Struct, frozen=True):
    """This step completes the prompt: save its KV, layer by layer, for ``peer``.

    With a ``refusal`` nothing is saved or reported: who waits for it learns why, where
    it ``is_named`` by the request, so that somebody may.
    """

    request_id: str
    transfer_id: str
    peer: str
    token_ids: tuple[int, ...]
    block_ids: BlockIds
    salt: bytes = b""
    refusal: str = ""
    is_named: bool = True


class P2PMetadata(KVConnectorMetadata, frozen=True):
    """One step's orders. ``aborts`` are requests whose loads end as soon as can be.

    Transfers of those that are also ``left_to_others`` are not released: another
    request of this engine is going to load them. ``withdrawals`` name saves, without
    tokens and blocks: nobody will ask for their entries.
    """

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    aborts: tuple[str, ...] = ()
    left_to_others: tuple[str, ...] = ()
    withdrawals: tuple[SaveOrder, ...] = ()

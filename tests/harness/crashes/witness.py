"""Tells in whose name a buffer counts each acknowledgement, as it happens."""

from __future__ import annotations

from collections.abc import Callable

from asynckv.buffers.entries.entries import Lease
from asynckv.buffers.lookup import LookupBuffer

__all__ = ("watch_acknowledgements",)


def watch_acknowledgements(
    buffer: LookupBuffer, hear: Callable[[str, str], None]
) -> None:
    """Call ``hear(entry_id, consumer)`` for each that counts from now on.

    What its consumers say of themselves is compared with it: an entry that was
    acknowledged for one that was dead before it could have done so is lost.
    """
    leases = buffer.ledger.leases
    acknowledge = leases.acknowledge

    def acknowledge_and_tell(lease: Lease) -> None:
        acknowledge(lease)
        hear(lease.entry.entry_id, lease.holder.consumer)

    vars(leases)["acknowledge"] = acknowledge_and_tell

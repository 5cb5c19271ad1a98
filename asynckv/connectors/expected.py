"""The loads that a scheduler side has ordered: what of their ends may be believed."""

from __future__ import annotations

from collections.abc import Iterable

from asynckv.abc import BlockIds, KVTransferResults
from asynckv.connectors.lifecycle import Life, Phase, TransferCounters, TransferLedger

__all__ = ("ExpectedLoads",)


class ExpectedLoads:
    """Each load that was ordered ends once; what else workers say is only counted."""

    def __init__(self) -> None:
        self._ledger = TransferLedger()
        self._aborts: list[str] = []

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._ledger)

    def are_quiet(self, request_id: str) -> bool:
        """Whether no older request of that id has a load that was aborted, and goes on.

        Until then its blocks are held, and whose an end is could not be told.
        """
        life = self._ledger.find(request_id, "recv")
        return life is None or life.phase is not Phase.STOPPING

    @property
    def counters(self) -> TransferCounters:
        """What was said of them, and what of it did not count."""
        return self._ledger.counters

    @property
    def has_aborts(self) -> bool:
        """Whether there is something for :meth:`take_aborts`."""
        return bool(self._aborts)

    def begin(self, request_id: str, block_ids: BlockIds) -> Life | None:
        """A load is ordered; ``None``, and counted, if the request has one."""
        return self._ledger.begin(request_id, "recv", frozenset(_flat(block_ids)))

    def abort(self, request_id: str) -> bool:
        """Nobody waits for it; ``True``: its blocks must stay until it has ended."""
        if self._ledger.cancel(request_id, "recv") is None:
            return False
        self._aborts.append(request_id)
        return True

    def take_aborts(self) -> tuple[str, ...]:
        """Return what the workers have to be told, once."""
        aborts, self._aborts = self._aborts, []
        return tuple(aborts)

    def hear(self, results: KVTransferResults) -> KVTransferResults:
        """Take what the workers say; return the ends that count, each once."""
        for request_id in results.finished_recving:
            is_failed = request_id in results.failed_recving
            why = results.reasons.get(request_id) or "the load failed"
            self._ledger.hear(request_id, "recv", why if is_failed else "")
        lives = self._ledger.take_untold()
        failed = [life for life in lives if life.reason]
        return KVTransferResults(
            finished_recving=frozenset(life.request_id for life in lives),
            failed_recving=frozenset(life.request_id for life in failed),
            # What else the workers name may be somebody else's by now.
            invalid_block_ids=frozenset[int]().union(*(f.block_ids for f in failed)),
            reasons={life.request_id: life.reason for life in failed},
        )

    def clear(self) -> None:
        """Tell the workers nothing more."""
        self._aborts.clear()


def _flat(block_ids: BlockIds) -> Iterable[int]:
    return (block for group in block_ids for block in group)

"""What a worker's results are to ``KVOutputAggregator``, and what it makes of them."""

from __future__ import annotations

from asynckv.abc import KVTransferResults
from asynckv.parallel.outputs import KVConnectorOutput

__all__ = ("output_of", "results_of")


def output_of(results: KVTransferResults) -> KVConnectorOutput:
    """Return what one rank says, for the aggregator."""
    return KVConnectorOutput(
        finished_sending=set(results.finished_sending),
        failed_sending=set(results.failed_sending),
        full_sending=set(results.full_sending),
        finished_recving=set(results.finished_recving),
        failed_recving=set(results.failed_recving),
        invalid_block_ids=set(results.invalid_block_ids),
        reasons=dict(results.reasons),
        parts=tuple(map(output_of, results.parts)),
    )


def results_of(output: KVConnectorOutput) -> KVTransferResults:
    """Return what all ranks say, for ``update_connector_output``."""
    return KVTransferResults(
        finished_sending=frozenset(output.finished_sending or ()),
        failed_sending=frozenset(output.failed_sending or ()),
        full_sending=frozenset(output.full_sending or ()),
        finished_recving=frozenset(output.finished_recving or ()),
        failed_recving=frozenset(output.failed_recving or ()),
        invalid_block_ids=frozenset(output.invalid_block_ids),
        reasons=dict(output.reasons),
        parts=tuple(map(results_of, output.parts)),
    )

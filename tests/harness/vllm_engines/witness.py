"""What blocks hold where they were computed, and where they were loaded: digests."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ("BlockWitness",)


class BlockWitness:
    """Looks at an engine's caches itself, past all that copies them.

    ``scheduler`` and ``worker`` are the two roles of its connector, in one process, and
    ``caches`` its layers in order. A prompt's blocks are looked at when its request is
    finished where it was computed, and before vLLM hears of them where they were
    loaded: each block of all layers is one digest.
    """

    def __init__(
        self, scheduler: Any, worker: Any, caches: Sequence[torch.Tensor]
    ) -> None:
        self._caches = caches
        self._loading: dict[str, Any] = {}
        self._computed: dict[str, list[str]] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        _before(worker, "start_load_kv", self._note_loads, worker)
        _after(scheduler, "request_finished_all_groups", self._note_computed)
        _after(worker, "get_transfer_results", self._note_loaded)

    def report(self) -> dict[str, Any]:
        """Return by transfer what was ``computed``, and ``loaded`` from which block."""
        return {"computed": self._computed, "loaded": self._loaded}

    def _note_loads(self, worker: Any) -> None:
        orders = worker._get_connector_metadata().orders
        for order in getattr(orders, "loads", ()):
            if order.block_ids:
                self._loading[order.request_id] = order

    def _note_computed(self, found: Any, request: Any, block_ids: Any) -> None:
        params = found[1] or {}
        if params.get("do_remote_prefill"):
            self._computed[params["transfer_id"]] = self._digests(block_ids[0])

    def _note_loaded(self, found: Any, *_: Any) -> None:
        for request_id in found.finished_recving:
            order = self._loading.pop(request_id, None)
            if order is not None:
                self._loaded[order.transfer_id] = {
                    "first_block": order.first_block,
                    "digests": self._digests(order.block_ids[0]),
                }

    def _digests(self, block_ids: Sequence[int]) -> list[str]:
        return [self._digest(block_id) for block_id in block_ids]

    def _digest(self, block_id: int) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for cache in self._caches:
            block = cache[block_id].contiguous()
            digest.update(block.flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _before(thing: Any, name: str, note: Callable[..., None], *told: Any) -> None:
    function = getattr(thing, name)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*told)
        return function(*args, **kwargs)

    setattr(thing, name, noted)


def _after(thing: Any, name: str, note: Callable[..., None]) -> None:
    function = getattr(thing, name)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        note(found, *args)
        return found

    setattr(thing, name, noted)

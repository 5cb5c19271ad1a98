"""What is saved of a prompt: once for all samples of it."""

from __future__ import annotations

import dataclasses
from typing import Final, TypeAlias

from asynckv.abc import KVRequest
from asynckv.connectors.keys import prompt_digest
from asynckv.connectors.p2p_orders import SaveOrder

__all__ = ("SampledPrompts", "SavedPrompt")

_REMEMBERED: Final = 1024
"""So many prompts are known of which more samples may come."""

_Key: TypeAlias = "tuple[str, str, str, str, bytes]"


@dataclasses.dataclass(slots=True)
class SavedPrompt:
    """One transfer, and the requests that share it: one, or the samples of one."""

    transfer_id: str
    request_ids: set[str] = dataclasses.field(default_factory=set)
    """All that have come; of them ``unfinished`` are still here."""
    unfinished: int = 0
    is_decided: bool = False
    """Whether one of them has saved it, or could not."""
    order: SaveOrder | None = None
    """Which entry that leaves, if it is saved: without tokens and blocks."""
    is_saved: bool = False
    is_promised: bool = False
    """Whether one of them was answered with it."""
    is_withdrawn: bool = False

    def join(self, request_id: str) -> None:
        """One more request shares it."""
        self.request_ids.add(request_id)
        self.unfinished += 1

    def withdraw(self) -> SaveOrder | None:
        """Return what was saved, once, if none of its requests can ask for it."""
        if self.order is None or self.unfinished or self.is_promised:
            return None
        order, self.order = self.order, None
        self.is_saved, self.is_withdrawn = False, True
        return order


class SampledPrompts:
    """Finds the transfer that samples of one prompt have in common.

    Of ``n`` samples an engine hands out the transfer of one, that which ends last: so
    it is the same for all. Some may end before others come.
    """

    def __init__(self) -> None:
        self._prompts: dict[_Key, SavedPrompt] = {}

    def join(self, request: KVRequest, transfer_id: str, peer: str) -> SavedPrompt:
        """Return what a request shares with its siblings, or has for itself.

        ``transfer_id`` is that of the first one. Siblings name the same transfer, or
        none; tokens and salt are compared too, as a client may choose ids.
        """
        if not request.parent_id:
            saved = SavedPrompt(transfer_id)
            saved.join(request.request_id)
            return saved
        params = request.kv_transfer_params or {}
        named = transfer_id if params.get("transfer_id") else ""
        digest = prompt_digest(request.token_ids, request.num_tokens)
        key = (request.parent_id, peer, named, request.salt, digest)
        found = self._prompts.get(key)
        if (
            found is None
            or found.is_withdrawn
            or request.request_id in found.request_ids
        ):
            self._prompts.pop(key, None)
            found = self._prompts[key] = SavedPrompt(transfer_id)
        found.join(request.request_id)
        while len(self._prompts) > _REMEMBERED:
            del self._prompts[next(iter(self._prompts))]
        return found

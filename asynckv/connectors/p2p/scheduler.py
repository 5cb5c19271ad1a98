"""The scheduler side of a peer-to-peer connector: which prompts go where."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from asynckv.abc import (
    BlockIds,
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorStep,
    KVRequest,
    KVScheduled,
    KVTransferResults,
    SupportsHMA,
    TakesHandshakes,
)
from asynckv.affinity import ThreadBound
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine, prompt_digest, salt_digest
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.requests import (
    LoadRequest,
    P2PMetadata,
    P2PParams,
    P2PRequest,
    SampledPrompts,
    SavedPrompt,
    SaveRequest,
    refusal_of_blocks,
)
from asynckv.connectors.transfers import ExpectedLoads, TransferCounters
from asynckv.observability.lines import as_line

__all__ = ("P2PScheduler", "P2PSchedulerStatistics")

logger = logging.getLogger(__name__)

_FULL_S: Final = 1.0
"""So long nothing is promised after a save that found no room where it is kept."""


@dataclasses.dataclass(frozen=True)
class P2PSchedulerStatistics:
    """Requests by what happens to them, and what was said of them in vain.

    ``refused_params`` came with a transfer that is none, or a peer that is not in the
    configuration.
    """

    requests: int
    loading: int
    refused_params: int
    transfers: TransferCounters


class P2PScheduler(ThreadBound, KVConnectorScheduler, SupportsHMA, TakesHandshakes):
    """Decides for one engine. A request's ``kv_transfer_params`` say what it is.

    ``{"do_remote_decode": true}`` is to be prefilled here for another engine; it may
    name a ``transfer_id``, so that the other engine can begin at once, and the ``peer``
    to push to (needed if several are configured). What it then carries to the other
    engine is ``{"do_remote_prefill": true, "transfer_id", "peer", "num_tokens",
    "incarnations", "shape"}``, of which only ``transfer_id`` is needed, and ``peer``
    where several are configured: a name of the configuration, never an address.

    Any number of requests may name one transfer, as those do that one request with
    ``n`` samples becomes. One of them loads it, the others are asked again until that
    has ended: by then the engine has its blocks in its own prefix cache, and at most
    the last two are computed. Where it has not, and after a load that failed, they
    fail at once, and ``kv_load_failure_policy`` says what that means.

    What was saved for a request that is aborted before it is answered is withdrawn,
    unless it names its transfer: then another engine may know of it.

    Samples of one prompt (``KVRequest.parent_id``) are saved once, as one transfer.

    With ``pull``, where a prompt found no room, nothing is promised for a second:
    requests are answered without ``kv_transfer_params``, and decoded as any others.
    """

    def __init__(self, config: KVTransferConfig, engine: KVEngine) -> None:
        self.engine = engine
        self.options = ConnectorOptions.of(config)
        self._params = P2PParams(engine, self.options)
        self._max_bytes = config.max_bytes
        self._requests: dict[str, P2PRequest] = {}
        self._pending_loads: list[LoadRequest] = []
        self._samples = SampledPrompts()
        # Saves that have not ended, by the request that saves.
        self._saves: dict[str, SavedPrompt] = {}
        self._loads = ExpectedLoads()
        # Which request loads a transfer now; and by request, whose loads go on.
        self._loading: dict[tuple[str, str], P2PRequest] = {}
        self._loaders: dict[str, P2PRequest] = {}
        # How many requests load a transfer, or are going to.
        self._wanting: collections.Counter[tuple[str, str]] = collections.Counter()
        self._left_to_others: list[str] = []
        self._withdrawals: list[SaveRequest] = []
        self._full_until = 0.0
        self._incarnations: tuple[str, ...] = ()
        self._refused_params = 0

    def set_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshake]
    ) -> None:
        self._check_thread()
        ranks = sorted(metadata)
        self._incarnations = tuple(metadata[rank].incarnation for rank in ranks)

    def on_new_request(self, request: KVRequest) -> None:
        self._check_thread()
        self._known(request)

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._check_thread()
        known = self._known(request)
        if not self._loads.are_free(request.request_id):
            return None, False  # an older load of that id is not quiet yet
        if not known.is_to_load:
            return 0, False
        if (loading := self._loading.get(known.transfer)) is not None:
            known.awaited = loading
            return None, False
        count = known.num_tokens - num_computed_tokens
        rest = self.engine.block_size * (1 if known.awaited is None else 2)
        has_begun = num_computed_tokens or known.awaited is not None
        if count <= 0 or (has_begun and count <= rest):
            return 0, False  # the step that it needs anyway computes so few
        if known.awaited is not None:
            known.refusal = _refusal_after(known.awaited, known)
        return count, True

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self._check_thread()
        known = self._known(request)
        if not known.is_to_load:
            return
        if num_external_tokens <= 0:
            self._release(known)
            return
        known.is_to_load = False
        size = self.engine.block_size
        first = (known.num_tokens - num_external_tokens) // size
        end = self.engine.blocks_of(known.num_tokens)
        blocks = tuple(group[first:end] for group in block_ids)
        load = LoadRequest(
            request_id=request.request_id,
            transfer_id=known.transfer_id,
            peer=known.peer,
            block_ids=blocks,
            first_block=first,
            num_tokens=known.num_tokens,
            digest=prompt_digest(request.token_ids, known.num_tokens),
            incarnations=known.incarnations,
            shape=known.shape,
            salt=salt_digest(request.salt),
            refusal=known.refusal or refusal_of_blocks(blocks, end - first),
        )
        known.load = self._loads.begin(request.request_id, load.block_ids)
        if known.load is None:
            self._want_no_more(known)
            return
        self._pending_loads.append(load)
        self._loaders[request.request_id] = known
        if not load.refusal:
            self._loading[known.transfer] = known

    def build_connector_meta(self, step: KVConnectorStep) -> KVConnectorMetadata:
        self._check_thread()
        saves = [request for each in step.scheduled if (request := self._save_of(each))]
        loads, self._pending_loads = self._pending_loads, []
        left, self._left_to_others = self._left_to_others, []
        withdrawals, self._withdrawals = self._withdrawals, []
        return P2PMetadata(
            loads=tuple(loads),
            saves=tuple(saves),
            aborts=self._loads.take_aborts(),
            left_to_others=tuple(left),
            withdrawals=tuple(withdrawals),
        )

    def update_connector_output(self, results: KVTransferResults) -> KVTransferResults:
        self._check_thread()
        if results.full_sending and self.options.direction == "pull":
            self._full_until = time.monotonic() + _FULL_S
        for request_id in results.finished_sending:
            saved = self._saves.pop(request_id, None)
            if saved is not None and request_id in results.failed_sending:
                saved.is_saved = False
        ended = self._loads.settle(results)
        for request_id in ended.finished_recving:
            known = self._loaders.pop(request_id)
            if self._loading.get(known.transfer) is known:
                del self._loading[known.transfer]
            if self._requests.get(request_id) is known:  # else it was aborted
                self._want_no_more(known)
        return ended

    def request_finished(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        self._check_thread()
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return False, None
        if known.is_to_load:
            self._release(known)
        if self._loads.abort(request.request_id):
            self._want_no_more(known)
            if known.transfer in self._wanting:
                self._left_to_others.append(request.request_id)
            return True, None
        if (saved := known.saved) is None:
            return False, None
        saved.unfinished -= 1
        if saved.is_saved and not known.is_to_save and not request.is_aborted:
            saved.is_promised = True
            return False, self._params_of(known)
        if not known.is_named and (save := saved.withdraw()) is not None:
            self._withdrawals.append(save)  # nobody has heard of it
        return False, None

    def request_finished_all_groups(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        return self.request_finished(request, block_ids)

    def has_pending_work(self) -> bool:
        ordered = self._pending_loads or self._withdrawals
        return bool(ordered or self._loads.has_aborts or len(self._loads))

    def statistics(self) -> P2PSchedulerStatistics:
        return P2PSchedulerStatistics(
            requests=len(self._requests),
            loading=len(self._loads),
            refused_params=self._refused_params,
            transfers=dataclasses.replace(self._loads.counters),
        )

    def shutdown(self) -> None:
        self._requests.clear()
        self._pending_loads.clear()
        self._withdrawals.clear()
        self._saves.clear()
        self._loads.clear()
        self._loading.clear()
        self._wanting.clear()

    def _known(self, request: KVRequest) -> P2PRequest:
        """Return what is known of a request; its parameters are read once."""
        known = self._requests.get(request.request_id)
        if known is None:
            known = self._requests[request.request_id] = P2PRequest(request)
            try:
                self._params.read(known)
                self._share(known)
            except (ValueError, TypeError) as exc:  # msgspec's are ValueErrors
                self._refused_params += 1
                why = as_line(str(exc))
                logger.warning("%s has no transfer: %s", as_line(known.name), why)
            if known.is_to_load:
                self._wanting[known.transfer] += 1
        return known

    def _share(self, known: P2PRequest) -> None:
        """Find what is saved of its prompt, perhaps by a sibling."""
        if known.is_to_save:
            request, transfer_id = known.request, known.transfer_id
            known.saved = self._samples.join(request, transfer_id, known.peer)
            known.transfer_id = known.saved.transfer_id

    def _save_of(self, scheduled: KVScheduled) -> SaveRequest | None:
        known = self._requests.get(scheduled.request_id)
        if known is None or (saved := known.saved) is None or not known.is_to_save:
            return None
        computed = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        if computed < known.request.num_tokens:
            return None
        known.is_to_save = False
        if saved.is_decided:
            return None  # a sibling has saved it, or could not
        end = self.engine.blocks_of(known.request.num_tokens)
        refusal = self._refusal_of(known.request, end)
        saved.is_decided, saved.is_saved = True, not refusal
        request = SaveRequest(
            request_id=known.name,
            transfer_id=known.transfer_id,
            peer=known.peer,
            token_ids=known.request.token_ids,
            block_ids=tuple(group[:end] for group in scheduled.block_ids),
            salt=salt_digest(known.request.salt),
            refusal=refusal,
            is_named=known.is_named,
        )
        if not refusal:
            saved.request = msgspec.structs.replace(request, token_ids=(), block_ids=())
            self._saves[known.name] = saved
        return request

    def _refusal_of(self, request: KVRequest, num_blocks: int) -> str:
        """Say why a prompt can never be kept here, or not now, if it cannot."""
        if time.monotonic() < self._full_until:
            return "the engine that computed it is full (kv_buffer_size, or max_bytes)"
        nbytes = num_blocks * (self.engine.block_nbytes or 0)
        if self.options.direction == "push" or nbytes <= self._max_bytes:
            return ""
        reason = (
            f"EntryTooLarge: {request.num_tokens} tokens are {nbytes} bytes of KV, "
            f"and at most {self._max_bytes} are kept (kv_buffer_size, or max_bytes)"
        )
        logger.warning(
            "the KV of %s is not saved: %s", as_line(request.request_id), reason
        )
        return reason

    def _release(self, known: P2PRequest) -> None:
        """Nothing of it is needed here: let the producer have its memory back."""
        known.is_to_load = False
        self._want_no_more(known)
        awaited, is_wanted = known.awaited, known.transfer in self._wanting
        if is_wanted or (awaited is not None and awaited.has_loaded):
            return  # it will be taken, or was
        self._pending_loads.append(
            LoadRequest(
                request_id=known.name,
                transfer_id=known.transfer_id,
                peer=known.peer,
                block_ids=(),
                num_tokens=known.num_tokens,
                digest=prompt_digest(known.request.token_ids, known.num_tokens),
                incarnations=known.incarnations,
                shape=known.shape,
            )
        )

    def _want_no_more(self, known: P2PRequest) -> None:
        """It does not load its transfer, nor is it going to."""
        self._wanting[known.transfer] -= 1
        if not self._wanting[known.transfer]:
            del self._wanting[known.transfer]

    def _params_of(self, known: P2PRequest) -> dict[str, object]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": known.transfer_id,
            "peer": self.engine.engine_id,
            "num_tokens": known.request.num_tokens,
            "incarnations": list(self._incarnations),
            "shape": msgspec.to_builtins(self.engine.shape),
        }


def _refusal_after(loader: P2PRequest, known: P2PRequest) -> str:
    """Say why a load would come to nothing after that of another request.

    Nothing, where that one was aborted, or failed since it had another prompt.
    """
    load = loader.load
    if load is None or load.is_cancelled:
        return ""
    if load.reason:
        return load.reason if known.has_prompt_of(loader) else ""
    return (
        f"{as_line(loader.name)} has loaded its transfer, and the blocks are not "
        "cached here: enable_prefix_caching lets requests share them"
    )

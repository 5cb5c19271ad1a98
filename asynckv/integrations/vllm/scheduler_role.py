"""What the connector of vLLM's scheduler does: turns its words into asynckv's.

Plain functions, in every step: what vLLM tells of requests that move nothing is not
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asynckv.abc.steps import (
    KVConnectorMetadata,
    KVConnectorStep,
    KVRequest,
    KVScheduled,
    KVTransferResults,
    as_block_ids,
)

if TYPE_CHECKING:
    from asynckv.integrations.vllm.settings import Settings

__all__ = ("SchedulerRole",)

_NO_STEP = KVConnectorStep()


class SchedulerRole:
    """Asks a :class:`~asynckv.abc.KVConnectorScheduler` on behalf of vLLM's."""

    def __init__(self, settings: Settings) -> None:
        self._connector = settings.make_scheduler()
        self._requests: dict[str, KVRequest] = {}
        self._computing: dict[str, int] = {}
        self._nothing: KVConnectorMetadata | None = None

    def on_new_request(self, request: Any) -> None:
        """Remember it, if it may move anything."""
        if request.kv_transfer_params is None or request.prompt_token_ids is None:
            return
        ours = _request_of(request)
        self._requests[ours.request_id] = ours
        self._computing[ours.request_id] = ours.num_tokens
        self._connector.on_new_request(ours)

    def matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As the connector says; at once for a request that moves nothing."""
        ours = self._requests.get(request.request_id)
        if ours is None:
            return 0, False
        return self._connector.get_num_new_matched_tokens(ours, num_computed_tokens)

    def allocated(
        self,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> None:
        """Blocks are there to load into."""
        ours = self._requests.get(request.request_id)
        if ours is not None:
            self._connector.update_state_after_alloc(
                ours, as_block_ids(block_ids), num_external_tokens
            )

    def orders(
        self, output: Any, block_ids: Callable[[str], Sequence[Sequence[int]]]
    ) -> KVConnectorMetadata | None:
        """Return what workers do in this step, ``None`` for nothing."""
        step = self._step(output, block_ids) if self._computing else _NO_STEP
        if output.preempted_req_ids and self._requests:
            step = KVConnectorStep(
                step.scheduled, self._preempted(output.preempted_req_ids)
            )
        orders = self._connector.build_connector_meta(step)
        if self._nothing is None:
            self._nothing = type(orders)()
        return None if orders == self._nothing else orders

    def believe(self, output: Any) -> None:
        """Leave of what the workers report only what vLLM survives."""
        if not (output.finished_sending or output.finished_recving):
            return
        results = self._connector.update_connector_output(
            KVTransferResults(
                finished_sending=frozenset(output.finished_sending or ()),
                finished_recving=frozenset(output.finished_recving or ()),
                failed_recving=frozenset(output.failed_recving or ()),
            )
        )
        output.finished_sending = set(results.finished_sending)
        output.finished_recving = set(results.finished_recving)

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM is done with a request, or it was aborted."""
        ours = self._requests.pop(request.request_id, None)
        if ours is None:
            return False, None
        self._computing.pop(ours.request_id, None)
        return self._connector.request_finished(ours, as_block_ids(block_ids))

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping."""
        return self._connector.has_pending_work()

    def reset_cache(self) -> bool | None:
        """Forget what is cached elsewhere."""
        return self._connector.reset_cache()

    def shutdown(self) -> None:
        """May be called again."""
        self._connector.shutdown()

    def _step(
        self, output: Any, block_ids: Callable[[str], Sequence[Sequence[int]]]
    ) -> KVConnectorStep:
        """Tell of those prompts whose computing has not been told to its end."""
        computed = {
            new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs
        }
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = []
        for request_id in [some for some in self._computing if some in computed]:
            count = output.num_scheduled_tokens[request_id]
            before = computed[request_id]
            scheduled.append(
                KVScheduled(
                    request_id, as_block_ids(block_ids(request_id)), before, count
                )
            )
            if before + count >= self._computing[request_id]:
                del self._computing[request_id]
        return KVConnectorStep(tuple(scheduled)) if scheduled else _NO_STEP

    def _preempted(self, request_ids: set[str]) -> frozenset[str]:
        """They are computed once more, from the start."""
        ours = frozenset(some for some in request_ids if some in self._requests)
        for request_id in ours:
            self._computing[request_id] = self._requests[request_id].num_tokens
        return ours


def _request_of(request: Any) -> KVRequest:
    """What is not in the tokens, and decides on their KV, goes in the salt."""
    parts = [request.cache_salt or ""]
    if request.lora_request is not None:
        parts.append(f"lora {request.lora_request.lora_name}")
    parts += [f"mm {feature.identifier}" for feature in request.mm_features or ()]
    return KVRequest(
        request.request_id,
        tuple(request.prompt_token_ids),
        request.kv_transfer_params,
        "\n".join(parts) if any(parts) else "",
    )

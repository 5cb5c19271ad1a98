"""The class that vLLM's V1 engine loads. Thin: each call goes to one of two roles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from asynckv.integrations.vllm.metrics import AsyncKVPromMetrics, AsyncKVStats
from asynckv.integrations.vllm.scheduler_role import SchedulerRole
from asynckv.integrations.vllm.settings import Settings
from asynckv.integrations.vllm.worker_role import WorkerRole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from asynckv.abc import KVConnectorMetadata as OurMetadata

__all__ = ("AsyncKVConnector", "AsyncKVMetadata")


@dataclasses.dataclass
class AsyncKVMetadata(KVConnectorMetadata):
    """What the scheduler's role tells the workers' of one step; mostly nothing."""

    orders: OurMetadata | None = None


class AsyncKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves vLLM's KV cache by asynckv: prefill here, decode there.

    One instance of each role, in processes of their own or in one. Nothing that is
    called in a step waits for a peer or for the loop.
    """

    _cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.P2P

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.of(vllm_config, kv_cache_config)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerRole(settings)
        else:
            self._worker = WorkerRole(settings)

    # The scheduler's side.

    def on_new_request(self, request: Request) -> None:
        self._scheduling.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._scheduling.allocated(
                request, blocks.get_block_ids(), num_external_tokens
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> AsyncKVMetadata:
        manager = self._kv_cache_manager
        orders = self._scheduling.orders(scheduler_output, manager.get_block_ids)
        return AsyncKVMetadata(orders)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduling.believe(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduling.has_pending_work()

    def reset_cache(self) -> bool | None:
        return self._scheduling.reset_cache()

    # The worker's side.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._working.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, AsyncKVMetadata):
            self._working.preempt(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, AsyncKVMetadata):
            self._working.begin_step(connector_metadata.orders)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        self._working.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: every load ends while its request waits, before a forward."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: object,
        **kwargs: Any,
    ) -> None:
        self._working.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Hand the step's saves over. Blocks stay until ``finished_sending``."""
        self._working.end_step()

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        return self._working.results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.invalid_blocks()

    def get_kv_connector_stats(self) -> AsyncKVStats | None:
        if self._worker is None:
            return None
        counts = self._worker.counts()
        return AsyncKVStats(counts) if counts else None

    # Both sides, and neither.

    def shutdown(self) -> None:
        for role in (self._scheduler, self._worker):
            if role is not None:
                role.shutdown()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise", False))

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> AsyncKVStats | None:
        return AsyncKVStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> AsyncKVPromMetrics:
        return AsyncKVPromMetrics(*args, **kwargs)

    @property
    def _scheduling(self) -> SchedulerRole:
        if self._scheduler is None:
            raise RuntimeError("this is a worker's connector, not the scheduler's")
        return self._scheduler

    @property
    def _working(self) -> WorkerRole:
        if self._worker is None:
            raise RuntimeError("this is the scheduler's connector, not a worker's")
        return self._worker

"""The class that vLLM's V1 engine loads. Thin: each call goes to one of two roles."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from asynckv.abc import KVTransferResults
from asynckv.connectors.options import layout_for_vllm
from asynckv.integrations.vllm.messages import (
    AsyncKVHandshake,
    AsyncKVMetadata,
    AsyncKVWorkerMetadata,
)
from asynckv.integrations.vllm.metrics import AsyncKVPromMetrics, AsyncKVStats
from asynckv.integrations.vllm.pages import attention_of, pages_of
from asynckv.integrations.vllm.plugin import log_as_vllm
from asynckv.integrations.vllm.scheduler_role import SchedulerRole
from asynckv.integrations.vllm.settings import Settings
from asynckv.integrations.vllm.worker_role import WorkerRole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ("AsyncKVConnector",)

logger = logging.getLogger("vllm.asynckv")  # vLLM shows only what is below "vllm"

_NOT_TOLD: Final = (
    "nothing will be found in the store: the workers' handshake did not come. In a "
    "MultiConnector, put AsyncKVConnector before those that have one of their own"
)


_NO_RESULTS: Final = KVTransferResults()
_NO_ORDERS: Final = AsyncKVMetadata()


class AsyncKVConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Moves vLLM's KV cache by asynckv: prefill here, decode there.

    One instance of each role, in processes of their own or in one. Nothing that is
    called in a step waits for a peer or for the loop, but for two cases: blocks of a
    preempted request that are still being saved, and, with a store, blocks that a step
    has computed, until they are copied. It has as many methods as vLLM calls.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        log_as_vllm()
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._attention = ""  # not known before the caches are registered
        settings = self._settings()
        self._groups = settings.groups
        self._has_groups = len(kv_cache_config.kv_cache_groups) > 1
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerRole(
                f"vllm worker {settings.engine.rank}",
                lambda: self._settings().make_worker(),
                reports_saves=settings.reports_saves,
                longest_save_s=settings.longest_save_s,
            )
        self._reports = _NO_RESULTS
        self._is_p2p = settings.reports_saves
        self._cache_hit_source = (
            CacheHitSource.P2P if self._is_p2p else CacheHitSource.EXTERNAL_UNSPECIFIED
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether what was promised must come; of a store nobody expects anything."""
        return self._is_p2p and bool(super().requires_kv_delivery)

    def shutdown(self) -> None:
        """End the role. May be called again."""
        for role in (self._scheduler, self._worker):
            if role is not None:
                role.shutdown()

    def on_new_request(self, request: Request) -> None:
        self._scheduling.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduling.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> AsyncKVMetadata:
        scheduling, manager = self._scheduling, self._kv_cache_manager
        are_read = scheduling.overwritten(scheduler_output.preempted_req_ids or set())
        orders = scheduling.orders(scheduler_output, manager.get_block_ids)
        if orders is None and not are_read:
            return _NO_ORDERS
        return AsyncKVMetadata(orders, must_be_quiet=are_read)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Leave in ``connector_output`` only what vLLM expects."""
        sent = connector_output.finished_sending
        received = connector_output.finished_recving
        told = connector_output.kv_connector_worker_meta
        said = told.ended if isinstance(told, AsyncKVWorkerMetadata) else None
        if not (sent or received or said):
            return  # in most steps
        sent, received = self._scheduling.apply_results(
            KVTransferResults(
                finished_sending=frozenset(sent or ()),
                finished_recving=frozenset(received or ()),
            ),
            said or KVTransferResults(),
        )
        connector_output.finished_sending = sent
        connector_output.finished_recving = received

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

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        ours = {
            rank: told
            for rank, told in metadata.items()
            if isinstance(told, AsyncKVHandshake)
        }
        self._attention = " and ".join(sorted({one.attention for one in ours.values()}))
        self._scheduling.take_handshakes(
            {
                rank: told.handshake
                for rank, told in ours.items()
                if told.handshake is not None
            }
        )

    def reset_cache(self) -> bool | None:
        return self._scheduling.reset_cache()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        pages = pages_of(self._kv_cache_config, kv_caches)
        _ask_for_amx()
        known = self._vllm_config, self._kv_cache_config
        self._attention = attention_of(*known, kv_caches)
        self._working.register(pages, self._groups)

    def get_handshake_metadata(self) -> AsyncKVHandshake:
        return AsyncKVHandshake(self._working.handshake, self._attention)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait, if blocks that are still read are about to be overwritten.

        Whatever happens: an exception here would end the engine.
        """
        if (
            isinstance(kv_connector_metadata, AsyncKVMetadata)
            and kv_connector_metadata.must_be_quiet
        ):
            self._working.wait_released(kv_connector_metadata.must_be_quiet)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, AsyncKVMetadata):
            self._working.begin_step(connector_metadata.orders)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        self._working.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: a load ends while its request waits, before its forward."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: object,
        **kwargs: Any,
    ) -> None:
        if layer_name in self._groups:  # others only read the KV of one of these
            self._working.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Hand the step's saves over; their blocks stay until ``finished_sending``."""
        self._working.end_step()

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        self._reports = results = self._working.results()
        if not results:
            return KVConnectorTransferResults()
        # Blocks that failed are told apart from others by ``invalid_blocks``, except
        # where a model has several groups of them.
        failed = results.failed_recving if self._has_groups else ()
        return KVConnectorTransferResults(
            set(results.finished_sending), set(results.finished_recving), set(failed)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._has_groups else set(self._reports.invalid_block_ids)

    def build_connector_worker_meta(self) -> AsyncKVWorkerMetadata | None:
        reports, self._reports = self._reports, _NO_RESULTS
        return AsyncKVWorkerMetadata.of(reports) if reports else None

    def get_kv_connector_stats(self) -> AsyncKVStats | None:
        role = self._worker or self._scheduler
        counts = None if role is None else role.take_counts()
        return None if counts is None else AsyncKVStats(counts)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return layout_for_vllm(extra)

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

    def _settings(self) -> Settings:
        is_worker = self.role is KVConnectorRole.WORKER
        return Settings.of(
            self._vllm_config,
            self._kv_cache_config,
            side="worker" if is_worker else "scheduler",
            attention=self._attention,
        )

    @functools.cached_property
    def _scheduling(self) -> SchedulerRole:
        """Made when it is first needed: then the workers have told of theirs."""
        if self.role is KVConnectorRole.WORKER:
            raise RuntimeError("this is a worker's connector, not the scheduler's")
        settings = self._settings()
        self._scheduler = SchedulerRole(
            settings.make_scheduler(),
            sees_all=settings.sees_all,
            reports_saves=settings.reports_saves,
        )
        if settings.sees_all and not self._attention:
            logger.warning(_NOT_TOLD)
        return self._scheduler

    @functools.cached_property
    def _working(self) -> WorkerRole:
        if self._worker is None:
            raise RuntimeError("this is the scheduler's connector, not a worker's")
        return self._worker


def _ask_for_amx() -> None:
    """Let this process use AMX tiles, as vLLM's attention on a CPU does.

    The kernel has to be asked, and else only a matrix product of many tokens asks:
    where the first prompt is loaded, none comes before the attention, which dies.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()

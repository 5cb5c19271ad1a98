"""What vLLM's configuration says to asynckv."""

from __future__ import annotations

from typing import Any

from asynckv.integrations.vllm.direct import DirectScheduler, DirectWorker


class Settings:
    def __init__(self, config: Any, cache_config: Any) -> None:
        self.config = config
        transfer = config.kv_transfer_config
        self.engine_id = transfer.engine_id
        self.extra = transfer.kv_connector_extra_config
        self.block_size = config.cache_config.block_size
        self.rank = 0
        self.groups = {
            name: number
            for number, group in enumerate(cache_config.kv_cache_groups)
            for name in group.layer_names
        }

    @classmethod
    def of(cls, config: Any, cache_config: Any) -> "Settings":
        return cls(config, cache_config)

    def make_scheduler(self) -> DirectScheduler:
        return DirectScheduler(self.engine_id, self.block_size)

    def make_worker(self) -> DirectWorker:
        return DirectWorker(
            self.engine_id,
            self.extra.get("listen"),
            self.extra.get("peers", []),
            {"model": self.config.model_config.model},
            self.block_size,
            float(self.extra.get("load_timeout_s", 10)),
        )

    def results_of(self, ended: Any, invalid: set[int]) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import (
            KVConnectorTransferResults,
        )

        invalid |= ended.invalid_block_ids
        return KVConnectorTransferResults(
            set(ended.finished_sending), set(ended.finished_recving), set()
        )

"""A connector that moves nothing: what vLLM itself does once it has one."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

__all__ = ("NothingConnector",)


class NothingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Does as little as vLLM allows."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._metadata = KVConnectorMetadata()

    def get_num_new_matched_tokens(self, *args: Any) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._metadata

    def request_finished(self, *args: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, *args: Any) -> tuple[bool, None]:
        return False, None

    def update_state_after_alloc(self, *args: Any) -> None:
        """Nothing."""

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

from __future__ import annotations

import pytest

from asynckv.abc import (
    BlockIds,
    KVConnectorScheduler,
    KVRequest,
    SupportsHMA,
    supports_hma,
)


class Hybrid(SupportsHMA):
    def request_finished_all_groups(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        return False, None


def test_the_abstract_connector_has_no_layout_to_ask_for() -> None:
    with pytest.raises(TypeError, match="abstract"):
        KVConnectorScheduler.get_required_kvcache_layout()


def test_a_class_and_its_instances_support_hybrid_models_alike() -> None:
    assert supports_hma(Hybrid)
    assert supports_hma(Hybrid())
    assert not supports_hma(KVConnectorScheduler)
    assert not supports_hma(object())

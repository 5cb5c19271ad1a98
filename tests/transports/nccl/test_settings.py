from __future__ import annotations

from asynckv.transports.nccl.directions import NcclSettings


def test_more_bytes_may_take_longer() -> None:
    settings = NcclSettings(patience_s=2.0, least_bytes_per_s=100.0)
    assert settings.timeout_s(0) == 2.0
    assert settings.timeout_s(300) == 5.0

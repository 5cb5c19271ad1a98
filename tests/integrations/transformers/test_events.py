from __future__ import annotations

import time

from asynckv.integrations.transformers import LayerEvent


def test_an_event_is_now_unless_told_otherwise() -> None:
    before = time.monotonic()
    event = LayerEvent(3, "landed")
    assert before <= event.at <= time.monotonic()
    assert LayerEvent(3, "landed", at=1.0).at == 1.0

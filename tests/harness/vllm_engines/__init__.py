"""Real vLLM engines with a tiny model, each in a process of its own."""

from __future__ import annotations

from harness.vllm_engines.engine import (
    Answer,
    Engine,
    StartEngine,
    make_tiny_model,
    random_prompt,
)
from harness.vllm_engines.pair import (
    PREFILL,
    Pair,
    free_url,
    started_pair,
    transfer,
)

__all__ = (
    "PREFILL",
    "Answer",
    "Engine",
    "Pair",
    "StartEngine",
    "free_url",
    "make_tiny_model",
    "random_prompt",
    "started_pair",
    "transfer",
)

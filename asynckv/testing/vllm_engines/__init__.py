"""Real vLLM engines with a tiny model, each in a process of its own."""

from __future__ import annotations

from asynckv.testing.vllm_engines.engine import Answer, Engine
from asynckv.testing.vllm_engines.tiny import make_tiny_model, random_prompt

__all__ = ("Answer", "Engine", "make_tiny_model", "random_prompt")

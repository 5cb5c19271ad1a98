"""Move LLM KV caches between processes and machines, awaitably."""

from __future__ import annotations

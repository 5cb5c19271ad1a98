"""asynckv inside real vLLM: a connector that its V1 engine loads by name.

``AsyncKVConnector`` needs vLLM and is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynckv.integrations.vllm.plugin import register

if TYPE_CHECKING:
    from asynckv.integrations.vllm.connector import AsyncKVConnector

__all__ = ("AsyncKVConnector", "register")


def __getattr__(name: str) -> object:
    if name == "AsyncKVConnector":
        from asynckv.integrations.vllm.connector import AsyncKVConnector

        return AsyncKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

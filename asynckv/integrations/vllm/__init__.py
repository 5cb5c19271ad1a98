"""asynckv inside real vLLM: a connector that its V1 engine loads by name.

``AsyncKVConnector`` needs vLLM 0.32 and is imported when it is first asked for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from asynckv.integrations.vllm.plugin import register

if TYPE_CHECKING:
    from asynckv.integrations.vllm.connector import AsyncKVConnector

__all__ = ("AsyncKVConnector", "register")

_NEEDED: Final = "0.32"


def __getattr__(name: str) -> object:
    if name != "AsyncKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from asynckv.integrations.vllm.connector import AsyncKVConnector
    except ImportError as exc:
        if (exc.name or "").partition(".")[0] != "vllm":
            raise
        there = getattr(sys.modules.get("vllm"), "__version__", None)
        here = f"here is {there}" if there else "none can be imported here"
        raise ImportError(
            f"AsyncKVConnector needs vLLM {_NEEDED}, and {here}: {exc}",
            name=exc.name,
            path=exc.path,
        ) from exc
    return AsyncKVConnector

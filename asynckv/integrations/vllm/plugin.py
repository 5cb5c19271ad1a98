"""What vLLM calls in each of its processes: names the connector to its factory."""

from __future__ import annotations

import logging
from typing import Final

__all__ = ("NAME", "log_as_vllm", "register")

logger = logging.getLogger(__name__)

NAME: Final = "AsyncKVConnector"
_MODULE: Final = "asynckv.integrations.vllm"


def register() -> None:
    """Let ``"kv_connector": "AsyncKVConnector"`` suffice. May be called again.

    The entry point of the group ``vllm.general_plugins``. It never makes an engine
    fail that does not use asynckv: of a vLLM that cannot take it, it logs.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import (
            KVConnectorFactory,
        )
    except ImportError as exc:
        logger.info("this vLLM has no factory of connectors: %s", exc)
        return
    try:
        KVConnectorFactory.register_connector(NAME, _MODULE, NAME)
    except ValueError:
        logger.debug("%s is registered already", NAME)


def log_as_vllm() -> None:
    """Let what asynckv logs appear as vLLM's own lines do. May be called again.

    Called where a connector is made, never by an import. Whoever has configured the
    logger ``asynckv``, or has told vLLM to configure none, is left alone.
    """
    ours, vllm = logging.getLogger("asynckv"), logging.getLogger("vllm")
    if ours.handlers or ours.level or not vllm.handlers:
        return
    for handler in vllm.handlers:
        ours.addHandler(handler)
    ours.setLevel(vllm.level)
    ours.propagate = vllm.propagate

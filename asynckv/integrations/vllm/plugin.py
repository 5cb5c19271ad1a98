"""What vLLM calls in each of its processes: names the connector to its factory."""

from __future__ import annotations

import logging
from typing import Final

__all__ = ("NAME", "register")

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

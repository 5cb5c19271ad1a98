"""A producer and a consumer, and what they are configured with."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from harness.vllm_engines.engine import Answer, Engine, StartEngine

__all__ = ("PREFILL", "Pair", "free_url", "started_pair", "transfer")

PREFILL: Final[Mapping[str, Any]] = {"do_remote_decode": True}
"""The ``kv_transfer_params`` of a request that another engine shall decode."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """One engine prefills, the other decodes."""

    producer: Engine
    consumer: Engine

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        """Send one request through both."""
        return self.consumer.ask(tokens, params=self.prefill(tokens), **options)

    def prefill(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return what the decoding request has to carry.

        :raises LookupError: the producer returned nothing of the kind
        """
        answer = self.producer.ask(tokens, max_tokens=1, params=PREFILL)
        if answer.kv_transfer_params is None:
            raise LookupError("the producer returned no kv_transfer_params")
        return dict(answer.kv_transfer_params)


@contextlib.contextmanager
def started_pair(
    start: StartEngine,
    policy: str = "fail",
    *,
    produce: Mapping[str, Any] | None = None,
    consume: Mapping[str, Any] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Pair]:
    """Start two engines of their own, and wait for both; leaving ends both.

    ``produce`` and ``consume`` are what the connector of each is told beside where
    the other is; ``options`` are those of ``LLM``, by "producer" and "consumer".
    """
    url = free_url()
    configs = {
        "producer": transfer("kv_producer", listen=url, **(produce or {})),
        "consumer": transfer("kv_consumer", policy, peers=[url], **(consume or {})),
    }
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(start(config, **(options or {}).get(who, {})))
            for who, config in configs.items()
        ]
        yield Pair(*(engine.wait_ready() for engine in engines))


def transfer(role: str, policy: str = "fail", **extra: Any) -> dict[str, Any]:
    """Return a ``kv_transfer_config`` of asynckv's connector."""
    return {
        "kv_connector": "AsyncKVConnector",
        "kv_connector_module_path": "asynckv.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def free_url() -> str:
    """Return an address that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"

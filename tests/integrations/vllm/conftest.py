"""Real engines: one that does all alone, and pairs of a producer and a consumer."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from harness.vllm_engines import (
    Engine,
    Pair,
    StartEngine,
    free_url,
    make_tiny_model,
    transfer,
)

OPTIONS: Final[dict[str, Any]] = {
    "enable_prefix_caching": True,
    # Prompts of more tokens are prefilled in several steps.
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def vllm_is_imported() -> None:
    """It warns as it is imported, and starts nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.worker.utils")
        importlib.import_module("vllm.v1.core.kv_cache_utils")
        importlib.import_module("asynckv.integrations.vllm.connector")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all engines have."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def start_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> StartEngine:
    """Start an engine without waiting for it."""
    folder = tmp_path_factory.mktemp("engines")
    numbers = itertools.count()

    def start(transfer: dict[str, Any] | None = None, **options: Any) -> Engine:
        log = folder / f"{next(numbers)}.log"
        given = {"dtype": "float32", **OPTIONS, **options}
        return Engine(model, log, transfer, **given)

    return start


@pytest.fixture(scope="module")
def alone(start_engine: StartEngine) -> Iterator[Engine]:
    """One that knows of no other and has blocks for all: what it says is right."""
    with start_engine() as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Of weights and KV."""
    return str(request.param)


@pytest.fixture(scope="session")
def trio(start_engine: StartEngine, dtype: str) -> Iterator[tuple[Engine, Pair]]:
    """An engine that knows of no other, and a pair: all alive together.

    The pair saves layer by layer; those of other tests when a prompt is computed.
    """
    url = free_url()
    with contextlib.ExitStack() as stack:
        single, producer, consumer = (
            stack.enter_context(start_engine(config, dtype=dtype))
            for config in (
                None,
                transfer("kv_producer", listen=url, layerwise=True),
                transfer("kv_consumer", peers=[url]),
            )
        )
        for engine in (single, producer, consumer):
            engine.wait_ready()
        yield single, Pair(producer, consumer)


@pytest.fixture
def single(trio: tuple[Engine, Pair]) -> Engine:
    """What it says is right."""
    return trio[0]


@pytest.fixture
def pair(trio: tuple[Engine, Pair]) -> Pair:
    """A producer and a consumer."""
    return trio[1]

"""Requests that are aborted while the step is computed that saves their prompt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.multi import MultiWorker
from asynckv.connectors.store.worker import StoreWorker
from harness.engines.toy_engine import ToyEngine
from harness.engines.toy_model import Rows, ToyModel
from harness.engines.toy_pairs import make_engine, pair_configs, toy_shape

MODEL = ToyModel()
NAMES = itertools.count()
TOKENS = list(range(64))
SAVE = {"do_remote_decode": True, "transfer_id": "t"}
LOAD: dict[str, object] = {"do_remote_prefill": True, "transfer_id": "t", "peer": "P"}


class InterruptedModel(ToyModel):
    """Computes the first layer, and by then somebody wants no more of it."""

    task: asyncio.Task[object] | None = None

    def rows(self, token_ids: Sequence[int], start: int, layer: int) -> Rows:
        if self.task is not None:
            self.task.cancel()
        return super().rows(token_ids, start, layer)


def multi(*parts: KVTransferConfig) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_buffer_size="16MiB",
        kv_connector_extra_config={
            "connectors": [
                {
                    "kv_connector": part.kv_connector,
                    "kv_role": part.kv_role,
                    "kv_connector_extra_config": part.kv_connector_extra_config,
                }
                for part in parts
            ]
        },
    )


@asynccontextmanager
async def engines_of(connector: str) -> AsyncIterator[tuple[ToyEngine, ToyEngine]]:
    name = next(NAMES)
    url, shape = f"mem://aborts{name}", toy_shape(MODEL)
    configs = pair_configs([f"{url}P"], [f"{url}D"], {"direction": "pull"})
    shared = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "store": url,
            "fingerprint": "toy",
            "chunk_tokens": 16,
        },
    )
    if connector == "StoreConnector":
        configs = shared, shared
    elif connector == "MultiConnector":
        configs = multi(configs[0], shared), multi(configs[1], shared)
    async with (
        StoreBuffer("16MiB", fingerprint="toy") as store,
        serve(url, store=store),
        make_engine("P", configs[0], shape, InterruptedModel()) as one,
        make_engine("D", configs[1], shape, MODEL) as two,
    ):
        yield one, two


async def abort_in_the_step(engine: ToyEngine) -> None:
    assert isinstance(engine.model, InterruptedModel)
    asked = engine.generate(TOKENS, request_id="a", kv_transfer_params=SAVE)
    engine.model.task = asyncio.create_task(asked)
    await asyncio.wait({engine.model.task})
    assert engine.model.task.cancelled()
    assert engine.blocks_in_use  # the step is not over
    await engine.quiet()
    (worker,) = engine.workers
    for each in worker.children if isinstance(worker, MultiWorker) else (worker,):
        if isinstance(each, StoreWorker):
            await each.flush()


async def loaded_by(
    engine: ToyEngine, name: str, params: Mapping[str, object] | None
) -> int:
    """Return how many tokens were not computed; what follows them is right."""
    output = await engine.generate(
        TOKENS, 2, request_id=name, kv_transfer_params=params
    )
    assert output.tokens == MODEL.generate(TOKENS, 2)
    return output.external_tokens


@pytest.mark.parametrize(
    ("connector", "asked"),
    [
        ("P2PConnector", [LOAD]),
        ("StoreConnector", [None]),
        ("MultiConnector", [None, LOAD]),
    ],
)
async def test_what_an_aborted_step_saved_is_what_it_computed(
    connector: str, asked: list[dict[str, object] | None]
) -> None:
    async with engines_of(connector) as (one, two):
        await abort_in_the_step(one)
        for number, params in enumerate(asked):
            assert await loaded_by(two, f"r{number}", params) == len(TOKENS)

from __future__ import annotations

import asyncio

from harness.engines.toy_engine import ToyEngine
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape
from harness.engines.toy_rank import ToyRank

MODEL = ToyModel()


def alone(num_blocks: int = 16, tp_size: int = 1) -> ToyEngine:
    shape = toy_shape(MODEL, tp_size=tp_size)
    ranks = [ToyRank(MODEL, shape, rank, num_blocks) for rank in range(tp_size)]
    return ToyEngine(ranks, num_blocks=num_blocks, chunk=32)


async def test_without_a_connector_it_generates_what_the_model_says() -> None:
    for tp_size in (1, 2):
        async with alone(tp_size=tp_size) as engine:
            tokens = list(range(70))
            output = await engine.generate(tokens, 4, request_id="r")
            assert output.tokens == MODEL.generate(tokens, 4)
            assert engine.blocks_in_use == 0


async def test_requests_wait_for_blocks_and_an_abort_gives_them_back() -> None:
    async with alone(num_blocks=5) as engine:
        tokens = list(range(70))
        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(engine.generate(tokens, 2, request_id=name))
            aborted = group.create_task(engine.generate(tokens, 9, request_id="x"))
            await asyncio.sleep(0)
            aborted.cancel()
        await engine.quiet()

"""Engines without a GPU: their caches depend on every token, and move whole."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

import msgspec
import pytest

from asynckv.config import KVTransferConfig
from asynckv.parallel.shapes import EngineShape, KVLayout, Rank
from harness.children import ask, line_of
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import free_urls, pair_configs, toy_shape
from harness.engines.toy_process import ToyAnswer, ToyAsked, ToySettings
from harness.forks import Fork, ForkServer
from harness.whole_cache import NOTHING, WholeCache

MODEL = ToyModel()


def test_kv_depends_on_every_token_before() -> None:
    one, two = MODEL.rows([1, 2, 3], 0, 1), MODEL.rows([9, 2, 3], 0, 1)
    assert one.shape == (3, 2, 4, 8)
    assert not (one == two).all(axis=(1, 2, 3)).any()
    assert (MODEL.rows([1, 2, 3], 2, 1) == one[2:]).all()


def test_the_next_token_depends_on_every_byte() -> None:
    model = ToyModel(layers=1, heads=1)
    rows = model.rows([1, 2, 3], 0, 0)[:, :, 0]
    before = model.next_token([model.sum_of(rows, 0, 0)])
    rows = rows.copy()
    rows[1, 0, 3] ^= 1
    assert model.next_token([model.sum_of(rows, 0, 0)]) != before


def shape_of(layout: KVLayout, tp: int = 1) -> EngineShape:
    return EngineShape(
        layout=layout, block_size=2, key_nbytes=1, num_kv_heads=2, tp_size=tp
    )


def test_a_rank_holds_its_heads_in_its_layout() -> None:
    # Keys are 0 to 5, values 6 to 11: two heads of three tokens.
    whole = WholeCache(shape_of(KVLayout.kv_first()), 3)

    def held(layout: KVLayout, tp: int = 1) -> list[list[list[int]]]:
        regions = whole.regions(shape_of(layout, tp), Rank(tp=tp - 1))
        return [region.tolist() for region in regions]

    none = NOTHING
    assert held(KVLayout.kv_first()) == [
        [[0, 1, 2, 3], [4, 5, none, none]],
        [[6, 7, 8, 9], [10, 11, none, none]],
    ]
    assert held(KVLayout.fused("HND")) == [
        [[0, 6, 2, 8, 1, 7, 3, 9], [4, 10, none, none, 5, 11, none, none]]
    ]
    assert held(KVLayout.blocks_first(), tp=2) == [[[1, 3, 7, 9], [5, none, 11, none]]]


def test_tokens_before_the_first_are_not_there() -> None:
    shape = shape_of(KVLayout.kv_first())
    keys, _ = WholeCache(shape, 3, 2).regions(shape, Rank())
    assert keys.tolist() == [[NOTHING] * 4, [4, 5, NOTHING, NOTHING]]


@contextlib.asynccontextmanager
async def started(
    forks: ForkServer, name: str, config: KVTransferConfig, shape: EngineShape
) -> AsyncIterator[Fork]:
    """Start such an engine in a process of its own; it ends with its input."""
    settings = msgspec.json.encode(ToySettings(name, config, shape)).decode()
    code = "from harness.engines.toy_process import main\nmain()"
    async with forks.running(code, settings) as process:
        assert await line_of(process) == "ready"
        yield process
        process.stdin.write_eof()
        assert await process.wait() == 0


async def answer_of(process: Fork, asked: ToyAsked) -> ToyAnswer:
    line = await ask(process, msgspec.json.encode(asked).decode())
    return msgspec.json.decode(line, type=ToyAnswer)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("sizes", "direction", "layout"),
    [
        ((2, 1), "pull", KVLayout.kv_first()),
        pytest.param(
            *((1, 2), "pull", KVLayout.blocks_first("HND")), marks=pytest.mark.chaos
        ),
        pytest.param((2, 1), "push", KVLayout.fused(), marks=pytest.mark.chaos),
        pytest.param((1, 2), "push", KVLayout.kv_first(), marks=pytest.mark.chaos),
    ],
)
async def test_the_caches_of_two_processes_are_byte_identical(
    forks: ForkServer, sizes: tuple[int, int], direction: str, layout: KVLayout
) -> None:
    p_size, d_size = sizes
    urls = free_urls(3)
    configs = pair_configs(urls[:p_size], urls[p_size:], {"direction": direction})
    chance = random.Random(3)
    tokens = [chance.randrange(50_000) for _ in range(150)]
    p_shape = toy_shape(MODEL, tp_size=p_size)
    d_shape = toy_shape(MODEL, tp_size=d_size, layout=layout)
    async with (
        started(forks, "P", configs[0], p_shape) as prefill,
        started(forks, "D", configs[1], d_shape) as decode,
    ):
        first = await answer_of(
            prefill, ToyAsked("p", tokens, 1, {"do_remote_decode": True})
        )
        last = await answer_of(
            decode, ToyAsked("d", tokens, 4, first.kv_transfer_params)
        )
    assert last.external_tokens == 150
    assert last.digests == first.digests and len(last.digests) == 4 * 4
    assert last.tokens == MODEL.generate(tokens, 4)

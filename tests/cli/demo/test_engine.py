from __future__ import annotations

from transformers import DynamicCache

from asynckv.cli.demo.worker import MAX_NEW_TOKENS, Engine, TokenClock

PROMPT = tuple(range(20))


def test_the_decoder_layers_are_found(engine: Engine) -> None:
    assert len(engine.layers) == 4


def test_a_prefill_fills_the_cache(engine: Engine) -> None:
    cache = DynamicCache(config=engine.model.config)
    engine.prefill(cache)
    assert cache.get_seq_length() == len(PROMPT)


def test_generating_from_the_prompt_computes_all_of_it(engine: Engine) -> None:
    with engine.recording() as recording:
        sequences = engine.generate(recording.clock)
    done = engine.continuation(recording, sequences)
    assert done.prompt_positions == len(PROMPT)
    assert len(done.tokens) == len(done.token_times_s) == MAX_NEW_TOKENS


async def test_computing_leaves_the_loop_free(engine: Engine) -> None:
    sequences = await engine.compute(lambda: engine.generate(TokenClock()))
    assert sequences.shape[1] == len(PROMPT) + MAX_NEW_TOKENS

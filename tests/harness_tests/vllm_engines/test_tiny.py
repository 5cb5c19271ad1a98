from __future__ import annotations

from harness.vllm_engines import random_prompt
from harness.vllm_engines.tiny import VOCABULARY


def test_a_prompt_is_the_same_for_the_same_seed_and_no_other() -> None:
    assert random_prompt(50, seed=1) == random_prompt(50, seed=1)
    assert random_prompt(50, seed=1) != random_prompt(50, seed=2)


def test_a_prompt_has_no_special_tokens_in_it() -> None:
    assert all(2 < token < VOCABULARY for token in random_prompt(1000, seed=3))

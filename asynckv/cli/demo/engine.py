"""A model in a worker: its computing thread, its layers, one prompt."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel

from asynckv.cli.demo.measurements import LayerClock, PositionCounter, TokenClock
from asynckv.cli.demo.place import HOST, Place

__all__ = ("MAX_NEW_TOKENS", "Continuation", "Engine", "Recording")

MAX_NEW_TOKENS = 48

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What a generation gave, and what it computed for it."""

    tokens: tuple[int, ...]
    token_times_s: tuple[float, ...]
    prompt_positions: int


class Engine:
    """One model and one prompt, computed in one thread at a time.

    ``place`` is where the model is; ``prompt`` is in host memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: tuple[int, ...],
        place: Place = HOST,
    ) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self.model = model
        self.place = place
        self.prompt = torch.tensor([prompt], dtype=torch.int64)
        self._inputs = self.prompt.to(model.device)
        self.layers = _decoder_layers(model)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "demo compute")

    def for_prompt(self, prompt: tuple[int, ...]) -> Self:
        """Return the same engine, and thread, with another prompt."""
        other = copy.copy(self)
        other.prompt = torch.tensor([prompt], dtype=torch.int64)
        other._inputs = other.prompt.to(self.model.device)
        return other

    async def compute(self, call: Callable[[], _T]) -> _T:
        """Run ``call`` in the computing thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Let the thread end by itself; what it computes is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def prefill(self, cache: DynamicCache) -> None:
        """Compute the prompt into ``cache``. Blocks."""
        with torch.inference_mode():
            self.model(
                self._inputs, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        self.place.settle()

    def generate(
        self, streamer: TokenClock, max_new_tokens: int = MAX_NEW_TOKENS
    ) -> torch.Tensor:
        """Compute the prompt and go on greedily. Blocks."""
        options = self.options(streamer) | {"max_new_tokens": max_new_tokens}
        mask = torch.ones_like(self._inputs)
        generate: Any = self.model.generate
        sequences: torch.Tensor = generate(self._inputs, attention_mask=mask, **options)
        return sequences

    def options(self, streamer: TokenClock) -> dict[str, Any]:
        """What all acts give to ``generate``."""
        return {
            "do_sample": False,
            "max_new_tokens": MAX_NEW_TOKENS,
            "streamer": streamer,
        }

    @contextlib.contextmanager
    def recording(
        self, came: Callable[[int], None] = lambda _: None
    ) -> Iterator[Recording]:
        """Count positions and note token times for as long as the block runs.

        ``came`` is called with how many tokens there are, in the computing thread.
        """
        with PositionCounter(self.model).counting() as forwards:
            yield Recording(forwards, TokenClock(came))

    def layer_clock(self) -> LayerClock:
        """A clock for the layers of this model."""
        return LayerClock(self.layers, self.place.settle)

    def continuation(
        self, recording: Recording, sequences: torch.Tensor
    ) -> Continuation:
        """Sum up one generation.

        Every forward after the first computes one position, of a new token.
        """
        new = sequences[0, self.prompt.shape[1] :].tolist()
        return Continuation(
            tokens=tuple(int(token) for token in new),
            token_times_s=tuple(recording.clock.times),
            prompt_positions=sum(recording.forwards) - (len(new) - 1),
        )


@dataclasses.dataclass(frozen=True)
class Recording:
    """What is measured while one generation runs."""

    forwards: list[int]
    clock: TokenClock


def _decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers")

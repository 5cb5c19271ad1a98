"""``generate`` from KV that was computed elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from asynckv.abc import KVLookupBuffer
from asynckv.integrations.transformers.consumer import load
from asynckv.integrations.transformers.forward import Forward
from asynckv.integrations.transformers.handoff import Handoff
from asynckv.integrations.transformers.layers import LayerObserver

__all__ = ("Generated", "continue_from", "generate_from")

_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "do_sample": (None, False),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "guidance_scale": (None, 1.0),
    "token_healing": (None, False),
    "return_dict_in_generate": (None, False),
    "remove_invalid_values": (None, False),
    **dict.fromkeys(
        (
            "bad_words_ids",
            "begin_suppress_tokens",
            "cache_implementation",
            "dola_layers",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "max_time",
            "penalty_alpha",
            "sequence_bias",
            "stop_strings",
            "suppress_tokens",
            "watermarking_config",
        ),
        (None,),
    ),
}
"""Where another value could change the first token, or what follows from it."""

_CANNOT_GO_ON: Final[dict[str, tuple[object, ...]]] = {
    "use_cache": (None, True),
    "prompt_lookup_num_tokens": (None,),
    "assistant_model": (None,),
    "assistant_early_exit": (None,),
}
"""Where transformers gives wrong tokens with another value, from whatever cache."""

_HARMLESS: Final = frozenset({"generation_config", "streamer"})


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """What ``generate`` returned, and where it began.

    ``sequences`` hold prompt and new tokens, as from ``generate`` on the whole
    prompt. ``prompt_positions_computed`` is 0 if the first token came along, 1
    if the last position was computed again, more if the entry was for a part of
    the prompt.
    """

    sequences: torch.Tensor
    output: object
    prompt_positions_computed: int
    matched_tokens: int
    entry_id: str
    attempt: int


async def generate_from(
    model: PreTrainedModel,
    input_ids: torch.Tensor | Sequence[int] | None,
    lookup: KVLookupBuffer,
    *,
    attention_mask: torch.Tensor | None = None,
    name: str = "",
    entry_id: str | None = None,
    min_matched_tokens: int = 1,
    use_carried: bool = True,
    observe: LayerObserver | None = None,
    **options: Any,
) -> Generated:
    """Select a prompt's KV and generate from it, with ``generate``'s ``options``.

    Waits for a match; the first forward starts at once and waits, layer by
    layer, for what is still on the wire. A next token that came along is taken
    without a forward where it is what plain greedy ``generate`` would choose;
    with ``use_carried=False`` the last position is always computed again.

    The entry is acknowledged as soon as the first forward has taken up all of
    it, before the generation ends; inside ``async with load(...)``,
    :func:`continue_from` has it given back however late the generation fails. A
    cancelled call gives the entry back, or has acknowledged it, and stops the
    forward at its next layer: it waits for that, at most 1 s.

    :raises IncompatiblePeer: another model computed it; given back
    :raises ConfigError: as for :func:`load`
    :raises EntryAborted: if the producer failed before the entry was complete
    :raises ValueError: for ``use_cache=False``, ``prompt_lookup_num_tokens``,
        ``assistant_model`` and ``assistant_early_exit``, also of a generation config:
        with these transformers goes on wrongly from a cache
    """
    settings = _Settings(model, options)
    loading = load(
        model,
        input_ids,
        lookup,
        attention_mask=attention_mask,
        name=name,
        entry_id=entry_id,
        min_matched_tokens=min_matched_tokens,
        observe=observe,
    )
    async with contextlib.AsyncExitStack() as generations:
        async with loading as handoff:
            generation = await _start(handoff, use_carried, settings)
            generations.push_async_callback(generation.aclose)
            waited = {handoff.taken_up, generation.ended}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if generation.ended.done():
                return generation.result()
            await handoff.landed()
        return await generation.wait()


async def continue_from(
    handoff: Handoff, *, use_carried: bool = True, **options: Any
) -> Generated:
    """Generate from ``handoff``, with ``generate``'s ``options``, in a thread.

    As :func:`generate_from`, for use inside ``async with load(...)``. What that refuses
    is refused here, too.
    """
    settings = _Settings(handoff.model, options)
    generation = await _start(handoff, use_carried, settings)
    try:
        return await generation.wait()
    finally:
        await generation.aclose()


async def _start(
    handoff: Handoff, use_carried: bool, settings: _Settings
) -> Forward[Generated]:
    steps = settings.greedy_steps() if use_carried else None
    first = await handoff.first_token() if steps is not None else None
    run = _Generation(handoff, settings, first, steps or 0)
    return Forward(run, handoff.stop, name="asynckv decode")


class _Settings:
    """``generate``'s options over the model's own generation config."""

    def __init__(self, model: PreTrainedModel, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        defaults = getattr(model, "generation_config", None)
        self._configs = (options.get("generation_config"), defaults)
        for field, usable in _CANNOT_GO_ON.items():
            if (value := self[field]) not in usable:
                raise ValueError(
                    f"generate() with {field}={value!r:.40} cannot go on from a cache"
                )

    def __getitem__(self, field: str) -> Any:
        if field in self.options:
            return self.options[field]
        values = (getattr(config, field, None) for config in self._configs)
        return next((value for value in values if value is not None), None)

    def greedy_steps(self) -> int | None:
        """Return ``max_new_tokens`` if nothing but greedy choice is asked for."""
        known = _HARMLESS | vars(GenerationConfig()).keys()
        if not known >= self.options.keys():
            return None
        if any(self[field] not in neutral for field, neutral in _NEUTRAL.items()):
            return None
        steps: int | None = self["max_new_tokens"]
        return steps

    def is_end(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which of ``tokens`` end their row."""
        ends = self["eos_token_id"]
        if ends is None:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return torch.isin(tokens, torch.as_tensor(ends, dtype=tokens.dtype).cpu())

    @property
    def rows_a_prompt(self) -> int:
        return max(self["num_beams"] or 1, self["num_return_sequences"] or 1)


class _Generation:
    """One ``generate``, to be called in the forward's thread."""

    def __init__(
        self,
        handoff: Handoff,
        settings: _Settings,
        first: torch.Tensor | None,
        steps: int,
    ) -> None:
        self._handoff, self._settings = handoff, settings
        self._first, self._steps = first, steps

    def __call__(self) -> Generated:
        if self._first is None:
            return self._generate(None, {})
        ended = self._settings.is_end(self._first)
        if self._steps == 1 or bool(ended.all()):
            return self._only(self._first)
        if bool(ended.any()):
            # generate() would not know which rows are through: let it see for itself.
            return self._generate(None, {})
        return self._generate(self._first, {"max_new_tokens": self._steps - 1})

    def _generate(
        self, first: torch.Tensor | None, changes: Mapping[str, Any]
    ) -> Generated:
        kwargs = self._handoff.generate_kwargs(first)
        options = self._settings.options | dict(changes)
        streamer = options.get("streamer")
        if streamer is not None and first is not None:
            options["streamer"] = _ResumedStreamer(streamer)
            _stream(streamer, self._handoff, first)
        if self._settings.rows_a_prompt > 1:
            kwargs["past_key_values"].batch_repeat_interleave(
                self._settings.rows_a_prompt
            )
        generate: Any = self._handoff.model.generate
        return self._generated(generate(**kwargs, **options))

    def _only(self, first: torch.Tensor) -> Generated:
        """The carried token is all that is to come: no forward."""
        streamer = self._settings.options.get("streamer")
        if streamer is not None:
            _stream(streamer, self._handoff, first)
            streamer.end()
        ids = self._handoff.prompt.ids
        sequences = torch.cat([ids, first.reshape(-1, 1)], dim=1)
        return self._generated(sequences.to(self._handoff.model.device))

    def _generated(self, output: Any) -> Generated:
        is_tensor = isinstance(output, torch.Tensor)
        return Generated(
            sequences=output if is_tensor else output.sequences,
            output=output,
            prompt_positions_computed=self._handoff.prompt_positions_computed,
            matched_tokens=self._handoff.length,
            entry_id=self._handoff.entry_id,
            attempt=self._handoff.attempt,
        )


class _ResumedStreamer(BaseStreamer):
    """Keeps ``generate`` from streaming the prompt a second time."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._is_prompt_due = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt_due:
            self._is_prompt_due = False
            return
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


def _stream(streamer: BaseStreamer, handoff: Handoff, first: torch.Tensor) -> None:
    streamer.put(handoff.prompt.ids)
    streamer.put(first)

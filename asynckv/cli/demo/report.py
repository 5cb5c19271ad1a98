"""What the demo found out: values only, as ``--json`` prints and the page draws them.

Times are seconds. Those of a hand-over count from the moment in which its
prefill's compute began.
"""

from __future__ import annotations

import msgspec

__all__ = (
    "BackpressureReport",
    "BackpressureSample",
    "DemoReport",
    "HandOver",
    "LayerTrace",
    "Recompute",
    "Survival",
)


class LayerTrace(msgspec.Struct, frozen=True):
    """One lane of the timeline: a layer's compute, its way, its arrival.

    ``handed_s`` is when the layer left the forward pass for the wire,
    ``landed_s`` when the decoder had verified its bytes.
    """

    name: str
    compute_start_s: float
    compute_end_s: float
    handed_s: float
    landed_s: float


class Recompute(msgspec.Struct, frozen=True):
    """Act 1: the decoder computes the prompt by itself."""

    first_token_s: float
    prompt_positions: int
    tokens: tuple[int, ...]


class HandOver(msgspec.Struct, frozen=True):
    """Acts 2, 3 and 5: one prefill here and one decode there.

    ``prefill_s`` is the prefill's compute; ``landed_s`` when the decoder had
    the last layer, ``first_token_s`` when it had its first token.
    """

    title: str
    prefill_s: float
    landed_s: float
    first_token_s: float
    prompt_positions: int
    attempt: int
    tokens: tuple[int, ...]
    layers: tuple[LayerTrace, ...]

    @property
    def tail_s(self) -> float:
        """How long the decoder's last layer came after the prefill's compute."""
        return max(0.0, self.landed_s - self.prefill_s)

    @property
    def wait_s(self) -> float:
        """Time to first token, counted from the end of the prefill's compute."""
        return max(0.0, self.first_token_s - self.prefill_s)


class BackpressureSample(msgspec.Struct, frozen=True):
    """The producer at one moment of act 4."""

    at_s: float
    buffered_bytes: int
    resident_bytes: int
    waiting: int


class BackpressureReport(msgspec.Struct, frozen=True):
    """Act 4: more entries than the buffer may hold, for a decoder in no hurry."""

    entries: int
    entry_bytes: int
    max_bytes: int
    longest_wait_s: float
    peak_bytes: int
    resident_growth_bytes: int
    worst_lag_s: float
    samples: tuple[BackpressureSample, ...]


class Survival(msgspec.Struct, frozen=True):
    """Act 5: the decoder dies in mid-transfer, another one takes the entry."""

    killed_pid: int
    landed_before: int
    prefill_running: bool
    back_after_s: float
    successor_pid: int
    taken_over: HandOver


class DemoReport(msgspec.Struct, frozen=True):
    """Everything one run of the demo measured.

    ``device`` is what both processes compute on, and have their buffers on.
    ``problems`` is empty exactly when the run kept what it promises.
    """

    model: str
    prompt_tokens: int
    kv_bytes: int
    prefill_pid: int
    decode_pid: int
    transport: str
    device: str
    recompute: Recompute
    bulk: HandOver
    layerwise: HandOver
    backpressure: BackpressureReport
    survival: Survival
    prefill_lag_s: float
    decode_lag_s: float
    text: str
    seconds: float
    problems: tuple[str, ...] = ()

    @property
    def tokens_identical(self) -> bool:
        """Did every act generate the tokens that act 1 generated?"""
        handed = (self.bulk, self.layerwise, self.survival.taken_over)
        return all(one.tokens == self.recompute.tokens for one in handed)

"""What the demo found out: values only, as ``--json`` prints and the page draws them.

Times are seconds. Those of an act count from its request: the moment in which the
parent asks its two processes.
"""

from __future__ import annotations

import msgspec

__all__ = (
    "BackpressureReport",
    "BackpressureSample",
    "DemoReport",
    "HandOver",
    "LayerTrace",
    "Machine",
    "Recompute",
    "SecondRequest",
    "Survival",
)


class LayerTrace(msgspec.Struct, frozen=True):
    """One row of the timeline: a layer's compute, its way, its arrival.

    ``handed_s`` is when the layer left the forward pass, ``landed_s`` when it was in
    the decoder. Keys and values of a layer exist before all of it is computed, so
    both may come before ``compute_end_s``.
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
    """Acts 2, 3 and 6: one prefill here and one decode there.

    ``prefill_s`` is when the prefill's compute ended, ``landed_s`` when the decoder
    had the last layer, ``first_token_s`` when it had its first token.
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
        """How long after the prefill's compute the last layer came; below 0: before."""
        return self.landed_s - self.prefill_s

    @property
    def stages_s(self) -> tuple[float, float, float]:
        """What the first token waited for: compute, then the tail, then its own step.

        They add up to ``first_token_s``. Where the last layer is there before the
        compute ends there is no tail, and what of the compute is left delays nothing.
        """
        compute_s = min(self.prefill_s, self.landed_s)
        return compute_s, self.landed_s - compute_s, self.first_token_s - self.landed_s


class SecondRequest(msgspec.Struct, frozen=True):
    """Act 4: another question about a document whose KV was kept.

    ``matched_tokens`` of the prompt were there, ``landed_s`` is when the decoder had
    their last layer, ``prompt_positions`` are those that it computed itself.
    ``recomputed`` is the same request without the kept KV: measured before and after,
    the faster one.
    """

    prompt_tokens: int
    matched_tokens: int
    prompt_positions: int
    landed_s: float
    first_token_s: float
    tokens: tuple[int, ...]
    recomputed: Recompute

    @property
    def stages_s(self) -> tuple[float, float, float]:
        """As those of a hand-over: nothing is computed before the KV comes."""
        return 0.0, self.landed_s, self.first_token_s - self.landed_s

    @property
    def saved_share(self) -> float:
        """By which share the first token comes earlier than without; below 0: later."""
        return 1 - self.first_token_s / self.recomputed.first_token_s


class BackpressureSample(msgspec.Struct, frozen=True):
    """The producer at one moment of act 5."""

    at_s: float
    buffered_bytes: int
    resident_bytes: int
    waiting: int


class BackpressureReport(msgspec.Struct, frozen=True):
    """Act 5: more entries than the buffer may hold, for a decoder in no hurry."""

    entries: int
    entry_bytes: int
    max_bytes: int
    longest_wait_s: float
    peak_bytes: int
    resident_growth_bytes: int
    worst_lag_s: float
    samples: tuple[BackpressureSample, ...]


class Survival(msgspec.Struct, frozen=True):
    """Act 6: the decoder dies in mid-transfer, another one takes the entry."""

    killed_pid: int
    landed_before: int
    prefill_running: bool
    back_after_s: float
    successor_pid: int
    taken_over: HandOver


class Machine(msgspec.Struct, frozen=True):
    """What ran, when and where, in words that name nobody."""

    version: str
    began: str
    host: str
    python: str
    torch: str


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
    second: SecondRequest
    backpressure: BackpressureReport
    survival: Survival
    prefill_lag_s: float
    decode_lag_s: float
    text: str
    machine: Machine
    seconds: float
    problems: tuple[str, ...] = ()

    @property
    def tokens_identical(self) -> bool:
        """Were the tokens the same as recomputed, in every act?"""
        handed = (self.bulk, self.layerwise, self.survival.taken_over)
        same = all(one.tokens == self.recompute.tokens for one in handed)
        return same and self.second.tokens == self.second.recomputed.tokens

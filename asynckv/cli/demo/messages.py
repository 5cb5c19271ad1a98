"""What the demo's processes say to each other: one line of JSON a message.

Orders go down to a worker's standard input, notes come up from its standard
output. Times are ``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from asynckv.cli.demo.report import BackpressureSample

__all__ = (
    "Answered",
    "Ask",
    "Computed",
    "Continue",
    "Doing",
    "Failed",
    "FillBuffer",
    "Filled",
    "FirstToken",
    "Generated",
    "KeptEntry",
    "Landed",
    "Load",
    "LoadModel",
    "Note",
    "Order",
    "Prefill",
    "Prefilled",
    "Progress",
    "ReadBack",
    "Ready",
    "Sampled",
    "Select",
    "SelectSlowly",
    "SlowlySelected",
    "Stored",
    "Text",
    "UseStore",
    "WaitReturned",
    "WaitStored",
    "Way",
    "decode_note",
    "decode_order",
    "encode_line",
)

Way: TypeAlias = Literal["bulk", "layerwise"]


class _Base(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Shared settings. Not a public base class."""


class Load(_Base, frozen=True, tag="load"):
    """Load the prepared model, connect to the prefill's buffer, and warm up.

    On a GPU ``max_bytes`` of its memory are for what is received.
    """

    folder: str
    url: str
    prompt: tuple[int, ...]
    second_prompt: tuple[int, ...]
    max_bytes: int
    warm_up: bool = True


class Prefill(_Base, frozen=True, tag="prefill"):
    """Compute the prompt's KV and hand it over: of it all, or of its document."""

    way: Way
    entry_id: str
    document_only: bool = False


class FillBuffer(_Base, frozen=True, tag="fill"):
    """Insert the prompt's KV this many times, as fast as the buffer takes it."""

    entry_ids: tuple[str, ...]


class WaitReturned(_Base, frozen=True, tag="wait_returned"):
    """Say when the prompt's entry can be selected again."""


class ReadBack(_Base, frozen=True, tag="read_back"):
    """Turn generated tokens into text."""

    tokens: tuple[int, ...]


class Continue(_Base, frozen=True, tag="continue"):
    """Compute the prompt, or the second one, from its tokens and go on.

    With ``first_only`` no further than to the first token.
    """

    second: bool = False
    first_only: bool = False


class Select(_Base, frozen=True, tag="select"):
    """Take the KV of the prompt, or of the second one, out of the buffer; go on.

    If ``dies_after`` is not 0, it kills itself (SIGKILL) once so many layers have
    landed: so it surely dies in mid-transfer, however fast layers come.
    """

    way: Way
    entry_id: str
    dies_after: int = 0
    second: bool = False


class SelectSlowly(_Base, frozen=True, tag="select_slowly"):
    """Take this many of the prompt's entries, with a pause after each."""

    entries: int
    pause_s: float


class LoadModel(_Base, frozen=True, tag="load_model"):
    """Load the model, which the first one prepares for all, and warm up.

    What is ready then says how many tokens ``document`` has, and how much KV that is.
    """

    document: str


class UseStore(_Base, frozen=True, tag="use_store"):
    """Keep KV in the store at ``url`` from here on; without: in one of its own.

    That has at most ``max_bytes`` and is empty.
    """

    url: str = ""
    max_bytes: int = 0


class Ask(_Base, frozen=True, tag="ask"):
    """Answer the last of the turns, which are the user's and the model's in turn.

    The first of them is about ``document``, if there is one.
    """

    turns: tuple[str, ...]
    max_new_tokens: int
    document: str = ""


class WaitStored(_Base, frozen=True, tag="wait_stored"):
    """Say when a tier of the store has all blocks of the prompts so far.

    What a tier had no room for, it never gets: so wait at most ``within_s``.
    """

    tier: str
    within_s: float = 30.0


Order: TypeAlias = (
    Load
    | Prefill
    | FillBuffer
    | WaitReturned
    | ReadBack
    | Continue
    | Select
    | SelectSlowly
    | LoadModel
    | UseStore
    | Ask
    | WaitStored
)


class Ready(_Base, frozen=True, tag="ready"):
    """The model is loaded and warm; the prefill also serves its buffer."""

    pid: int
    url: str = ""
    model: str = ""
    folder: str = ""
    prompt: tuple[int, ...] = ()
    second_prompt: tuple[int, ...] = ()
    kv_bytes: int = 0
    max_bytes: int = 0
    layers: int = 0
    transport: str = ""
    device: str = ""
    torch: str = ""


class Doing(_Base, frozen=True, tag="doing"):
    """What the process does now, and how far it is: ``done`` of ``total``, if any."""

    what: str
    done: int = 0
    total: int = 0


class Computed(_Base, frozen=True, tag="computed"):
    """The prefill has computed this layer."""

    layer: int


class Landed(_Base, frozen=True, tag="landed"):
    """This layer is in the decoder."""

    layer: int


class Sampled(_Base, frozen=True, tag="sampled"):
    """How full the buffer is, for the live display."""

    sample: BackpressureSample
    max_bytes: int


class Prefilled(_Base, frozen=True, tag="prefilled"):
    """The prefill is done: each layer's compute span and when it was handed over."""

    ended_s: float
    spans: tuple[tuple[float, float], ...]
    handed_s: tuple[float, ...]
    worst_lag_s: float


class Filled(_Base, frozen=True, tag="filled"):
    """Every entry is in, or was taken."""

    waits_s: tuple[float, ...]
    samples: tuple[BackpressureSample, ...]
    worst_lag_s: float


class KeptEntry(_Base, frozen=True, tag="kept"):
    """The entry is back in the buffer."""

    at_s: float
    matched_tokens: int


class Text(_Base, frozen=True, tag="text"):
    """The generated text."""

    text: str


class Generated(_Base, frozen=True, tag="generated"):
    """The decoder's tokens, and when everything came."""

    landed_s: tuple[float, ...]
    token_times_s: tuple[float, ...]
    prompt_positions: int
    attempt: int
    tokens: tuple[int, ...]
    worst_lag_s: float
    matched_tokens: int = 0


class SlowlySelected(_Base, frozen=True, tag="slowly_selected"):
    """All entries were taken, in this order."""

    entry_ids: tuple[str, ...]
    worst_lag_s: float


class FirstToken(_Base, frozen=True, tag="first_token"):
    """The first token of an answer is there."""


class Answered(_Base, frozen=True, tag="answered"):
    """The answer is there whole, and its KV is stored.

    ``by_tier`` has how many blocks of the prompt were found where,
    ``first_token_s`` counts from the moment in which the engine read the request.
    """

    prompt_tokens: int
    found_tokens: int
    computed_tokens: int
    by_tier: dict[str, int]
    first_token_s: float
    tokens: tuple[int, ...]
    text: str


class Stored(_Base, frozen=True, tag="stored"):
    """The tier has these blocks of this engine's prompts; ``missing`` never came."""

    keys: tuple[str, ...]
    missing: tuple[str, ...] = ()


class Failed(_Base, frozen=True, tag="failed"):
    """The order could not be carried out."""

    error: str


Progress: TypeAlias = Doing | Computed | Landed | Sampled

Note: TypeAlias = (
    Ready
    | Doing
    | Computed
    | Landed
    | Sampled
    | Prefilled
    | Filled
    | KeptEntry
    | Text
    | Generated
    | SlowlySelected
    | FirstToken
    | Answered
    | Stored
    | Failed
)

_encoder = msgspec.json.Encoder()
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_notes: msgspec.json.Decoder[Note] = msgspec.json.Decoder(Note)


def encode_line(message: Order | Note) -> bytes:
    """Return the message as one line, its newline included."""
    return _encoder.encode(message) + b"\n"


def decode_order(line: bytes) -> Order:
    """Read one order.

    :raises msgspec.MsgspecError: if it is none
    """
    return _orders.decode(line)


def decode_note(line: bytes) -> Note:
    """Read one note.

    :raises msgspec.MsgspecError: if it is none
    """
    return _notes.decode(line)

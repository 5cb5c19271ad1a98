"""What is asked of the engines: about one document, in one chat, and after a kill."""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, TypeAlias

from asynckv.cli.demo.models import read_prompt

__all__ = (
    "AFTER_THE_KILL",
    "CHUNK_TOKENS",
    "Part",
    "Step",
    "Workload",
    "read_workload",
)

Part: TypeAlias = Literal["document", "chat", "killed"]

CHUNK_TOKENS: Final = 64
"""So many tokens are one block, which is one value of the store."""

_ANSWER_TOKENS: Final = 12
_KINDS: Final[Mapping[Part, tuple[str, int]]] = {
    "document": ("question", _ANSWER_TOKENS),
    "chat": ("turn", 24),
}
"""What a request of each part is called, and how many tokens an answer has."""

_QUESTIONS: Final = (
    "Who was Ansa Merrow?",
    "What ran from the upper kitchen to the lower one?",
    "Why did the stairs give way?",
    "What stood on the wooden tag of each portion?",
    "What happened to Corin in the winter storm?",
    "Where is the ledger today?",
)

AFTER_THE_KILL: Final = "What did Old Pell's father try?"


@dataclasses.dataclass(frozen=True)
class Step:
    """One request: to engine 1 or 2, ``words`` being the user's."""

    part: Part
    name: str
    engine: int
    words: str
    max_new_tokens: int = _ANSWER_TOKENS


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is asked twice: ``steps``, one by one, those of a part one after another."""

    document: str
    steps: tuple[Step, ...]


def read_workload() -> Workload:
    """Read the story and the chat; both engines are asked in turn. Blocks."""
    chat = importlib.resources.files(__package__).joinpath("chat.txt")
    turns = chat.read_text(encoding="utf-8").splitlines()
    steps = (*_steps("document", _QUESTIONS), *_steps("chat", turns))
    return Workload(read_prompt().document, tuple(steps))


def _steps(part: Part, several: Iterable[str]) -> Iterator[Step]:
    kind, tokens = _KINDS[part]
    for number, words in enumerate(several):
        yield Step(part, f"{kind} {number + 1}", number % 2 + 1, words, tokens)

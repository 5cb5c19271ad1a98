"""What is asked of the engines: about one document, in one chat, and after a kill."""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

__all__ = (
    "AFTER_THE_KILL",
    "CHUNK_TOKENS",
    "DOCUMENT_TOKENS",
    "Part",
    "Step",
    "chat_steps",
    "document_steps",
)

Part: TypeAlias = Literal["document", "chat", "killed"]

CHUNK_TOKENS: Final = 64
"""So many tokens are one block, which is one value of the store."""

DOCUMENT_TOKENS: Final = 16
"""New tokens of an answer about the document."""

_CHAT_TOKENS: Final = 32

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
    max_new_tokens: int = DOCUMENT_TOKENS


def document_steps() -> Iterator[Step]:
    """Yield the questions about the document, to one engine and the other in turn."""
    for number, question in enumerate(_QUESTIONS):
        name = f"question {number + 1}"
        yield Step("document", name, number % 2 + 1, question)


def chat_steps() -> Iterator[Step]:
    """Yield the user's turns of the chat, to one engine and the other in turn."""
    chat = importlib.resources.files(__package__).joinpath("chat.txt")
    for number, words in enumerate(chat.read_text(encoding="utf-8").splitlines()):
        yield Step("chat", f"turn {number + 1}", number % 2 + 1, words, _CHAT_TOKENS)

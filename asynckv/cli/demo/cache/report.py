"""What is asked in the demo of the cache, and what it found out.

About one document, in one chat, and after a kill. Times to first token count from the
moment in which the parent sends the request, by its own clock, to the moment in which
it reads that the token is there.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.resources
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, TypeAlias

import msgspec

from asynckv.cli.demo.models import read_prompt
from asynckv.cli.demo.report import Machine

__all__ = (
    "AFTER_THE_KILL",
    "CHUNK_TOKENS",
    "CacheReport",
    "Part",
    "Request",
    "Step",
    "Workload",
    "find_problems",
    "hit_rate",
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


class Request(msgspec.Struct, frozen=True):
    """One request and its answer.

    ``by_tier`` counts blocks of the prompt where the store said that they are; KV of
    ``found_tokens`` was loaded. ``engine_first_token_s`` is by the engine's own clock,
    from the moment in which it read the request.
    """

    part: Part
    name: str
    engine: int
    prompt_tokens: int
    found_tokens: int
    computed_tokens: int
    by_tier: dict[str, int]
    first_token_s: float
    engine_first_token_s: float
    tokens: tuple[int, ...]


class CacheReport(msgspec.Struct, frozen=True):
    """Everything one run of the demo measured.

    ``alone`` and ``shared`` are the same requests, to engines that have a cache each
    and to engines that share a store. ``restarted``: after the kill the new engine and
    then the old engine were asked the same. ``cold``: the new engine again,
    with nothing stored. ``problems`` is empty exactly when the run kept what it
    promises.
    """

    model: str
    chunk_tokens: int
    block_bytes: int
    memory_bytes: int
    alone: tuple[Request, ...]
    shared: tuple[Request, ...]
    restarted: tuple[Request, Request]
    cold: Request
    blocks_on_disk: int
    blocks_missing: int
    killed_pids: tuple[int, int]
    server_back_s: float
    machine: Machine
    seconds: float
    problems: tuple[str, ...] = ()

    @property
    def cold_first_tokens_s(self) -> tuple[float, ...]:
        """Of questions about the document, before the kill, with none of it stored."""
        asked = (*self.alone, *self.shared)
        questions = (one for one in asked if one.part == "document")
        return tuple(one.first_token_s for one in questions if not one.found_tokens)

    @property
    def found_first_tokens_s(self) -> tuple[float, ...]:
        """Of those whose document the shared store had, before the kill."""
        questions = (one for one in self.shared if one.part == "document")
        return tuple(one.first_token_s for one in questions if one.found_tokens)

    @property
    def document_ratio(self) -> float:
        """The median first token with the document in the store, by that without."""
        found_s = statistics.median(self.found_first_tokens_s)
        return found_s / statistics.median(self.cold_first_tokens_s)

    @property
    def restart_ratio(self) -> float:
        """The first token of the new engine with the disk, by that with nothing."""
        return self.restarted[0].first_token_s / self.cold.first_token_s

    @property
    def tokens_identical(self) -> bool:
        """Were the tokens the same, whatever was found?"""
        return all(one.tokens == other.tokens for one, other in self.pairs)

    @property
    def pairs(self) -> tuple[tuple[Request, Request], ...]:
        """Each request without and with the shared store, in the order of asking."""
        return (
            *zip(self.alone, self.shared, strict=True),
            *((self.cold, one) for one in self.restarted),
        )

    @property
    def read_blocks(self) -> dict[str, int]:
        """Blocks that engines got out of the shared store, by where they were."""
        counted: collections.Counter[str] = collections.Counter()
        for one in (*self.shared, *self.restarted):
            counted.update(one.by_tier)
        return counted

    @property
    def sums(self) -> dict[str, object]:
        """The figures that its values add up to, for ``--json``."""
        return {
            "tokens_identical": self.tokens_identical,
            "document_ratio": self.document_ratio,
            "restart_ratio": self.restart_ratio,
            "hit_rate_alone": hit_rate(self.alone),
            "hit_rate_shared": hit_rate(self.shared),
        }


def hit_rate(requests: Iterable[Request]) -> float:
    """Return which share of all prompt tokens was found."""
    several = tuple(requests)
    return sum(one.found_tokens for one in several) / sum(
        one.prompt_tokens for one in several
    )


def find_problems(report: CacheReport) -> Iterator[str]:
    """Yield what the run did not keep of what it promises."""
    for other, one in report.pairs:
        if one.tokens != other.tokens:
            yield f"{one.name}: the tokens differ from those without the store"
    for one in (request for pair in report.pairs for request in pair):
        if one.found_tokens != report.chunk_tokens * sum(one.by_tier.values()):
            yield f"{one.name}, engine {one.engine}: not all that was there was loaded"
    for before, one in itertools.pairwise((*report.shared, *report.restarted)):
        if one.found_tokens < _least(before, one, report.chunk_tokens):
            yield f"{one.name}, engine {one.engine}: less was found than was stored"
    if not report.restarted[0].by_tier.get("disk"):
        yield "After the kill: the disk had nothing of the document"
    if report.cold.found_tokens:
        yield "The cold engine was not cold"


def _least(before: Request, one: Request, chunk_tokens: int) -> int:
    """Return how much there is to be found: of the document at least one block."""
    if one.part != "chat":
        return chunk_tokens
    # A turn begins with the prompt of the one before.
    same_chat = before.part == "chat"
    return before.prompt_tokens // chunk_tokens * chunk_tokens if same_chat else 0

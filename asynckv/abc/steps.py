"""What engine and connector tell each other: values only, all of them encodable.

They cross processes, so they hold plain numbers and text: no tensor, lock or handle.
Token counts are of one request; block ids are those of one rank's cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

__all__ = (
    "BlockIds",
    "KVAnswer",
    "KVConnectorHandshake",
    "KVConnectorMetadata",
    "KVConnectorStep",
    "KVQuestion",
    "KVRequest",
    "KVScheduled",
    "KVTransferResults",
)

BlockIds: TypeAlias = tuple[tuple[int, ...], ...]
"""The blocks of a request in the order of its tokens: a tuple for each cache group."""


class KVRequest(msgspec.Struct, frozen=True):
    """One request, as the engine's scheduler knows it.

    ``kv_transfer_params`` come from outside, perhaps from a client: they may name a
    transfer and a peer of the configuration, never an address. With ``is_aborted`` it
    ends without an answer: what it would carry to another engine reaches nobody.
    Requests of one ``parent_id`` are samples of one prompt; they are answered together,
    and one of them is what carries something to another engine.
    """

    request_id: str
    token_ids: tuple[int, ...]
    kv_transfer_params: Mapping[str, object] | None = None
    salt: str = ""
    is_aborted: bool = False
    parent_id: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.token_ids)


class KVScheduled(msgspec.Struct, frozen=True):
    """One request's part of one step.

    ``block_ids`` are all blocks it has by now, ``num_computed_tokens`` what was
    computed or loaded before this step.
    """

    request_id: str
    block_ids: BlockIds
    num_computed_tokens: int
    num_scheduled_tokens: int


class KVConnectorStep(msgspec.Struct, frozen=True):
    """What the engine runs next. ``preempted`` lose their blocks before it runs."""

    scheduled: tuple[KVScheduled, ...] = ()
    preempted: frozenset[str] = frozenset()


class KVConnectorMetadata(msgspec.Struct, frozen=True):
    """What a scheduler side tells every worker side of one step.

    Each connector has a subclass of its own; any of them is encodable with msgspec,
    and picklable for engines that do that.
    """


class KVConnectorHandshake(msgspec.Struct, frozen=True):
    """What one rank's worker tells its scheduler side after it was registered."""

    rank: int
    incarnation: str = ""


class KVQuestion(msgspec.Struct, frozen=True):
    """Which of ``keys``, in order, are stored elsewhere? Asked for one request.

    ``asker`` is which of several connectors asks. ``number`` tells its questions apart:
    an id may come again while an older question of it is not answered yet.
    """

    request_id: str
    keys: tuple[str, ...]
    asker: int = 0
    number: int = 0

    def answered(self, num_keys: int) -> KVAnswer:
        """Return the answer to just this question."""
        return KVAnswer(self.request_id, num_keys, self.asker, self.number)


class KVAnswer(msgspec.Struct, frozen=True):
    """The first ``num_keys`` of them are."""

    request_id: str
    num_keys: int
    asker: int = 0
    number: int = 0


class KVTransferResults(msgspec.Struct, frozen=True):
    """What has ended since the last time, each request once a direction.

    ``failed_recving`` are in ``finished_recving`` too: their blocks are quiet and
    may be used again, and what ``invalid_block_ids`` name must not be read. In the same
    way ``failed_sending``: their KV is nowhere but here. ``full_sending`` are those of
    them that found no room where they would have been kept. ``reasons`` says why.
    ``parts``, where a connector is made of several, says what is whose: a request may
    be under way in more than one. The rest is all of them together.
    """

    finished_sending: frozenset[str] = frozenset()
    failed_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    reasons: dict[str, str] = {}
    parts: tuple[KVTransferResults, ...] = ()
    full_sending: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(
            self.finished_sending or self.finished_recving or self.invalid_block_ids
        )

    def __or__(self, other: KVTransferResults) -> KVTransferResults:
        return KVTransferResults(
            self.finished_sending | other.finished_sending,
            self.failed_sending | other.failed_sending,
            self.finished_recving | other.finished_recving,
            self.failed_recving | other.failed_recving,
            self.invalid_block_ids | other.invalid_block_ids,
            self.reasons | other.reasons,
            tuple(
                one | another
                for one, another in itertools.zip_longest(
                    self.parts, other.parts, fillvalue=KVTransferResults()
                )
            ),
            self.full_sending | other.full_sending,
        )

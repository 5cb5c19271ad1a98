"""What engines ask of a connector, and what its scheduler side tells its workers.

What a request says of its transfer comes from outside, and is judged here. Of a prompt
that is sampled several times the KV is saved once.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

import msgspec

from asynckv.abc import BlockIds, KVConnectorMetadata, KVRequest
from asynckv.connectors.engine import KVEngine, prompt_digest
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.transfers import TransferState
from asynckv.parallel.shapes import EngineShape

__all__ = (
    "LoadRequest",
    "P2PMetadata",
    "P2PParams",
    "P2PRequest",
    "SampledPrompts",
    "SaveRequest",
    "SavedPrompt",
    "StoreMetadata",
    "StorePart",
    "StoreRequest",
    "refusal_of_blocks",
)


def refusal_of_blocks(block_ids: BlockIds, num_blocks: int) -> str:
    """Say why so many blocks cannot be loaded, if a group has not as many."""
    fewest = min(map(len, block_ids), default=num_blocks)
    if fewest >= num_blocks:
        return ""
    return (
        f"a group has {fewest} blocks for the {num_blocks} that are to be loaded: its "
        "blocks hold another number of tokens than the engine's block_size"
    )


class LoadRequest(msgspec.Struct, frozen=True):
    """Fill ``block_ids`` from a transfer, beginning with its block ``first_block``.

    The transfer's prompt must begin with the ``num_tokens`` tokens of this ``digest``,
    and must have been computed with the same ``salt`` (see :class:`EntryHeader`).
    Without blocks nothing is loaded or reported: the producer of that prompt learns
    that nobody needs it. ``shape`` is how its engine says its KV is cut.
    ``is_async``: between steps; else the next forward waits for it, layer by layer.
    With a ``refusal`` nothing is asked for: the load fails at once, for that reason.
    """

    request_id: str
    transfer_id: str
    peer: str
    block_ids: BlockIds
    first_block: int = 0
    num_tokens: int = 0
    digest: bytes = b""
    incarnations: tuple[str, ...] = ()
    shape: EngineShape | None = None
    is_async: bool = True
    salt: bytes = b""
    refusal: str = ""


class SaveRequest(msgspec.Struct, frozen=True):
    """This step completes the prompt: save its KV, layer by layer, for ``peer``.

    With a ``refusal`` nothing is saved or reported: who waits for it learns why, where
    it ``is_named`` by the request, so that somebody may.
    """

    request_id: str
    transfer_id: str
    peer: str
    token_ids: tuple[int, ...]
    block_ids: BlockIds
    salt: bytes = b""
    refusal: str = ""
    is_named: bool = True


class P2PMetadata(KVConnectorMetadata, frozen=True):
    """One step's orders. ``aborts`` are requests whose loads end as soon as can be.

    Transfers of those that are also ``left_to_others`` are not released: another
    request of this engine is going to load them. ``withdrawals`` name saves, without
    tokens and blocks: nobody will ask for their entries.
    """

    loads: tuple[LoadRequest, ...] = ()
    saves: tuple[SaveRequest, ...] = ()
    aborts: tuple[str, ...] = ()
    left_to_others: tuple[str, ...] = ()
    withdrawals: tuple[SaveRequest, ...] = ()


class StorePart(NamedTuple):
    """The blocks that one value has of a request: its own from ``first`` on.

    ``number`` is which of its prompt's values it is.
    """

    key: str
    number: int
    block_ids: BlockIds
    first: int


class StoreRequest(msgspec.Struct, frozen=True):
    """Load or save these blocks: what values of a store have of a prompt.

    They are those of the prompt from ``first_block`` on, to the end of the last value.
    There is a key for each value that has one of them. With a ``refusal`` the load
    fails at once, for that reason. ``number`` tells requests of one id apart.
    """

    request_id: str
    keys: tuple[str, ...]
    block_ids: BlockIds
    first_block: int = 0
    refusal: str = ""
    number: int = 0

    def parts(self, num_blocks: int) -> Iterator[StorePart]:
        """Yield, one by one, what each value of so many blocks has of it.

        :raises ValueError: a group has not the blocks up to the end of the last value
        """
        first = self.first_block // num_blocks
        count = (first + len(self.keys)) * num_blocks - self.first_block
        if any(len(group) != count for group in self.block_ids):
            raise ValueError(f"{len(self.keys)} values have {count} blocks of it")
        return self._parts(num_blocks, first)

    def _parts(self, num_blocks: int, first: int) -> Iterator[StorePart]:
        for number, key in enumerate(self.keys, first):
            start = number * num_blocks - self.first_block
            cut = slice(max(0, start), start + num_blocks)
            blocks = tuple(group[cut] for group in self.block_ids)
            yield StorePart(key, number, blocks, max(0, -start))


class StoreMetadata(KVConnectorMetadata, frozen=True):
    """One step's orders. ``aborts`` are requests whose loads end as soon as can be."""

    loads: tuple[StoreRequest, ...] = ()
    saves: tuple[StoreRequest, ...] = ()
    aborts: tuple[str, ...] = ()


_REMEMBERED: Final = 1024
"""So many prompts are known of which more samples may come."""

_Key: TypeAlias = "tuple[str, str, str, str, bytes]"


@dataclasses.dataclass(slots=True)
class SavedPrompt:
    """One transfer, and the requests that share it: one, or the samples of one."""

    transfer_id: str
    request_ids: set[str] = dataclasses.field(default_factory=set)
    """All that have come; of them ``unfinished`` are still here."""
    unfinished: int = 0
    is_decided: bool = False
    """Whether one of them has saved it, or could not."""
    request: SaveRequest | None = None
    """Which entry that leaves, if it is saved: without tokens and blocks."""
    is_saved: bool = False
    is_promised: bool = False
    """Whether one of them was answered with it."""
    is_withdrawn: bool = False

    def join(self, request_id: str) -> None:
        """One more request shares it."""
        self.request_ids.add(request_id)
        self.unfinished += 1

    def withdraw(self) -> SaveRequest | None:
        """Return what was saved, once, if none of its requests can ask for it."""
        if self.request is None or self.unfinished or self.is_promised:
            return None
        request, self.request = self.request, None
        self.is_saved, self.is_withdrawn = False, True
        return request


class SampledPrompts:
    """Finds the transfer that samples of one prompt have in common.

    Of ``n`` samples an engine hands out the transfer of one, that which ends last: so
    it is the same for all. Some may end before others come.
    """

    def __init__(self) -> None:
        self._prompts: dict[_Key, SavedPrompt] = {}

    def join(self, request: KVRequest, transfer_id: str, peer: str) -> SavedPrompt:
        """Return what a request shares with its siblings, or has for itself.

        ``transfer_id`` is that of the first one. Siblings name the same transfer, or
        none; tokens and salt are compared too, as a client may choose ids.
        """
        if not request.parent_id:
            saved = SavedPrompt(transfer_id)
            saved.join(request.request_id)
            return saved
        params = request.kv_transfer_params or {}
        named = transfer_id if params.get("transfer_id") else ""
        digest = prompt_digest(request.token_ids, request.num_tokens)
        key = (request.parent_id, peer, named, request.salt, digest)
        found = self._prompts.get(key)
        if (
            found is None
            or found.is_withdrawn
            or request.request_id in found.request_ids
        ):
            self._prompts.pop(key, None)
            found = self._prompts[key] = SavedPrompt(transfer_id)
        found.join(request.request_id)
        while len(self._prompts) > _REMEMBERED:
            del self._prompts[next(iter(self._prompts))]
        return found


_MAX_ID_LENGTH: Final = 200
_MAX_INCARNATIONS: Final = 1024


class _Params(msgspec.Struct, frozen=True):
    """What a request may say of its transfer. It comes from outside."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: str = ""
    peer: str = ""
    num_tokens: int | None = None
    incarnations: tuple[str, ...] = ()
    shape: EngineShape | None = None


@dataclasses.dataclass(slots=True)
class P2PRequest:
    """A request until it is finished, and what is still to be done for it."""

    request: KVRequest
    transfer_id: str = ""
    peer: str = ""
    num_tokens: int = 0
    incarnations: tuple[str, ...] = ()
    shape: EngineShape | None = None
    is_to_load: bool = False
    is_to_save: bool = False
    is_named: bool = False
    """Whether it names its transfer itself, so that others may know of it already."""
    saved: SavedPrompt | None = None
    """What is saved of its prompt, if it is, perhaps by a sibling."""
    load: TransferState | None = None
    """Its own load, once it is ordered."""
    awaited: P2PRequest | None = None
    """Which request loads the same transfer; it waits for that one's end."""
    refusal: str = ""
    """Why its load would come to nothing, if that is known."""

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def transfer(self) -> tuple[str, str]:
        """What requests have in common that name one transfer."""
        return self.peer, self.transfer_id

    @property
    def has_loaded(self) -> bool:
        """Whether its load is over, and brought everything."""
        return self.load is not None and self.load.is_over and not self.load.reason

    def has_prompt_of(self, other: P2PRequest) -> bool:
        """Whether it has the same prompt as another request of the same transfer."""
        mine, its = self.request, other.request
        return (mine.token_ids, mine.salt) == (its.token_ids, its.salt)


class P2PParams:
    """Reads the ``kv_transfer_params`` of requests, for one engine."""

    def __init__(self, engine: KVEngine, options: ConnectorOptions) -> None:
        self._engine, self._options = engine, options

    def read(self, known: P2PRequest) -> None:
        """Note what is to be done for a request: nothing, where that raises.

        :raises ValueError: its transfer is none, or its peer is not configured
        :raises TypeError: it cannot be read at all
        """
        given = known.request.kv_transfer_params
        if given is None:
            return
        params = msgspec.convert({name: given[name] for name in given}, _Params)
        known.name.encode()  # it goes to the workers too
        _check_name("transfer_id", params.transfer_id)
        _check_name("peer", params.peer)
        if len(params.incarnations) > _MAX_INCARNATIONS:
            raise ValueError(f"{len(params.incarnations)} incarnations")
        for incarnation in params.incarnations:
            _check_name("incarnation", incarnation)
        known.is_named = bool(params.transfer_id)
        known.transfer_id = params.transfer_id or secrets.token_hex(16)
        if params.do_remote_prefill:
            if not params.transfer_id:
                raise ValueError("it says of no transfer_id where its KV is")
            named = self._sender if self._is_push else self._peer_named
            known.peer = named(params.peer)
            wanted = known.request.num_tokens
            given_tokens = wanted if params.num_tokens is None else params.num_tokens
            known.num_tokens = max(0, min(wanted, given_tokens))
            known.incarnations = params.incarnations
            # A peer that did not say is cut as this engine is.
            known.shape = params.shape or self._engine.shape_over(
                self._options.ranks_of(known.peer)
            )
            known.is_to_load = known.num_tokens > 0
        elif params.do_remote_decode:
            known.peer = self._peer_named(params.peer) if self._is_push else ""
            known.is_to_save = True

    @property
    def _is_push(self) -> bool:
        return self._options.direction == "push"

    def _peer_named(self, name: str) -> str:
        """Return one of the configured peers, and never anything else.

        :raises ValueError: it is none of them, or it is not said which
        """
        peers = self._options.peers
        if name in peers or (name and peers and not self._options.are_peers_named):
            return name  # by its URL no name is known here: the worker asks who it is
        if not name and len(peers) == 1:
            return next(iter(peers))
        raise ValueError(f"{name[:80]!r} is none of the {len(peers)} configured peers")

    def _sender(self, name: str) -> str:
        """Return who is said to send: it is not dialled, so anybody may be named."""
        only = tuple(self._options.peers) if self._options.are_peers_named else ()
        return name[:_MAX_ID_LENGTH] or (only[0] if len(only) == 1 else "")


def _check_name(what: str, name: str) -> None:
    """Refuse what could not be sent on, or logged."""
    if len(name) > _MAX_ID_LENGTH or not name.isprintable():
        raise ValueError(f"a {what} of {len(name)} characters, or of unprintable ones")

"""What a request says of its transfer: it comes from outside, and is judged here."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Final

import msgspec

from asynckv.abc import KVRequest
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.lifecycle import Life
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p_samples import SavedPrompt
from asynckv.parallel.shapes import EngineShape

__all__ = ("P2PParams", "P2PRequest")

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
    load: Life | None = None
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
    def is_loading(self) -> bool:
        """Whether its load is under way."""
        return self.load is not None and not self.load.is_over

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
        try:
            self._read(known)
        except BaseException:
            known.is_to_load = known.is_to_save = False
            raise

    def _read(self, known: P2PRequest) -> None:
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
        if params.do_remote_prefill:
            if not params.transfer_id:
                raise ValueError("it says of no transfer_id where its KV is")
            named = self._sender if self._is_push else self._peer_named
            known.peer = named(params.peer)
            wanted = known.request.num_tokens
            given_tokens = wanted if params.num_tokens is None else params.num_tokens
            known.num_tokens = max(0, min(wanted, given_tokens))
            known.incarnations = params.incarnations
            known.shape = params.shape or self._shape_of(known.peer)
            known.is_to_load = known.num_tokens > 0
        elif params.do_remote_decode:
            known.peer = self._peer_named(params.peer) if self._is_push else ""
            known.is_to_save = True
        known.is_named = bool(params.transfer_id)
        known.transfer_id = params.transfer_id or secrets.token_hex(16)

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

    def _shape_of(self, peer: str) -> EngineShape | None:
        """Return how the KV of a peer is cut that did not say: as ours."""
        return self._engine.shape_over(self._options.ranks_of(peer))


def _check_name(what: str, name: str) -> None:
    """Refuse what could not be sent on, or logged."""
    if len(name) > _MAX_ID_LENGTH or not name.isprintable():
        raise ValueError(f"a {what} of {len(name)} characters, or of unprintable ones")

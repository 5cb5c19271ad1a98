"""Which peers there are. Each is imported only in its own environment."""

from __future__ import annotations

import importlib
from typing import Final

from benchmarks.peers.peer import Peer

__all__ = ("KINDS", "peer_class", "peers_of")

KINDS: Final = {
    "streams": "streams:Streams",
    "streams-read": "streams:StreamsRead",
    "anyio": "anyio_streams:AnyioStreams",
    "zmq": "zmq_pair:ZmqPair",
    "gloo": "gloo:Gloo",
    "grpc": "grpc_aio:GrpcAio",
    "redis": "redis_store:RedisStore",
    "flight": "flight:Flight",
    "nixl": "nixl:Nixl",
    "nixl-tcp": "nixl:NixlTcp",
    "mooncake": "mooncake:Mooncake",
}


def peers_of(environment: str) -> list[str]:
    """Return the peers that are measured in an environment of that name.

    >>> peers_of("nixl"), peers_of("zmq")
    (['nixl', 'nixl-tcp'], ['zmq'])
    """
    return [name for name in KINDS if name.partition("-")[0] == environment]


def peer_class(name: str) -> type[Peer]:
    """Return the class of a peer.

    :raises ImportError: its package is not in this environment
    """
    module, _, attribute = KINDS[name].partition(":")
    found = getattr(importlib.import_module(f"benchmarks.peers.{module}"), attribute)
    if not (isinstance(found, type) and issubclass(found, Peer)):
        raise ImportError(f"{KINDS[name]} is no peer")
    return found

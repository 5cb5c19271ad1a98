"""Who has connected and is not let in yet: few, and none for long.

When there is no room the newest is let in and another one goes: of the network
that has the most, and there of the host that has the most, unless that is less
than an eighth of all places; then one that has said nothing; then by chance. So
a flood from one network, or one that says nothing, takes no place of anybody
else who has spoken. One that speaks and comes from everywhere takes each with a
chance of ``1 / max_count`` whenever one of it comes: who is slow is kept out.
"""

from __future__ import annotations

import collections
import ipaddress
import random
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ("Strangers",)

T = TypeVar("T")

_SHARES: Final = 8
_IPV4_PREFIX: Final = 24
_IPV6_PREFIX: Final = 64


class _Origin(NamedTuple):
    network: str
    host: str


class Strangers(Generic[T]):
    """At most ``max_count`` of them. Each host is an IP address, or empty.

    ``has_spoken(stranger)`` is asked before one goes that nothing was heard of.
    """

    def __init__(
        self, max_count: int, has_spoken: Callable[[T], bool] = lambda _: False
    ) -> None:
        self._max_count = max_count
        self._has_spoken = has_spoken
        self._fair_share = max(1, max_count // _SHARES)
        self._origins: dict[T, _Origin] = {}
        self._silent: set[T] = set()

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, stranger: T, host: str) -> T | None:
        """Let one in, and return the one that has to go for it, if any."""
        victim = None
        origin = _Origin(_network_of(host), host)
        if len(self._origins) >= self._max_count:
            victim = self._choose(origin)
            self.discard(victim)
        self._origins[stranger] = origin
        self._silent.add(stranger)
        return victim

    def note_heard(self, stranger: T) -> None:
        """It has said something."""
        self._silent.discard(stranger)

    def discard(self, stranger: T) -> None:
        """It has proved itself, or is gone."""
        self._origins.pop(stranger, None)
        self._silent.discard(stranger)

    def _choose(self, newest: _Origin) -> T:
        origins = [*self._origins.values(), newest]
        in_network = collections.Counter(origin.network for origin in origins)
        at_host = collections.Counter(origins)
        ranks = {
            each: (
                max(in_network[origin.network], self._fair_share),
                max(at_host[origin], self._fair_share),
                each in self._silent,
            )
            for each, origin in self._origins.items()
        }
        worst = max(ranks.values())
        candidates = [each for each in ranks if ranks[each] == worst]
        random.shuffle(candidates)
        for each in candidates:
            if each not in self._silent or not self._has_spoken(each):
                return each
            self.note_heard(each)
        return candidates[0]


def _network_of(host: str) -> str:
    if not host:
        return ""
    ip = ipaddress.ip_address(host)
    prefix = _IPV4_PREFIX if ip.version == 4 else _IPV6_PREFIX
    return str(ipaddress.ip_interface(f"{host}/{prefix}").network)

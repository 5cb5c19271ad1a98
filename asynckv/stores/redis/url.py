"""``redis://host:6379/0?retain_s=86400``: which Redis it is, and how it is used.

Everything but the scheme and three options of our own is redis-py's: see
``redis.Redis.from_url``.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Sequence
from typing import Final

from asynckv.errors import ConfigError
from asynckv.observability.lines import redacted

__all__ = ("LEAST_LANES", "MAX_LANES", "RedisPlace", "parse_redis_url")

MAX_LANES: Final = 8
"""So many threads a process has for all its Redis tiers."""
LEAST_LANES: Final = 3
_LANES: Final = 4
_PATIENCE_S: Final = 0.05
_OPTIONS: Final = ("lanes", "patience_s", "retain_s")
_HINT: Final = "write redis://host:6379/0, or with ?retain_s=86400 or ?lanes=4"
_SCHEMES: Final = {
    "redis": ("redis", False),
    "rediss": ("rediss", False),
    "redis+unix": ("unix", False),
    "redis+cluster": ("redis", True),
    "rediss+cluster": ("rediss", True),
}


@dataclasses.dataclass(frozen=True)
class RedisPlace:
    """A server, or a cluster by one of its nodes; ``url`` is what redis-py reads.

    ``shown`` is the URL without what is nobody's business. A value stays for
    ``retain_s`` after it was written, if that is not ``None``; ``patience_s`` is as in
    :class:`~asynckv.abc.tiers.TierFacts`.
    """

    url: str = dataclasses.field(repr=False)
    shown: str
    is_cluster: bool
    retain_s: float | None = None
    patience_s: float = _PATIENCE_S
    lanes: int = _LANES


def parse_redis_url(url: str) -> RedisPlace:
    """Return what the URL of a Redis tier says.

    :raises ConfigError: it is none, or says nothing of use
    """
    if not isinstance(url, str):
        raise TypeError(f"a URL is a str, not {url!r:.40}")
    try:
        parts = urllib.parse.urlsplit(url)
        has_host = bool(parts.hostname)
        is_wrong = parts.port == 0 or parts.fragment or parts.scheme not in _SCHEMES
    except ValueError:  # its words, and all of the URL, may have the password
        raise _unreadable(url) from None
    host = parts.netloc.rpartition("@")[2]
    options = urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
    behind = "".join((parts.path, parts.fragment, *dict(options)))
    if "@" in behind if has_host else host:  # a password goes on there
        raise _unreadable(url)
    shown = f"{parts.scheme}://{host}{parts.path}"
    if is_wrong:
        raise _wrong(shown, "it names no server")
    scheme, is_cluster = _SCHEMES[parts.scheme]
    if (scheme == "unix") == has_host or (scheme == "unix" and len(parts.path) < 2):
        raise _wrong(
            shown, "it names no path" if scheme == "unix" else "it has no host"
        )
    own = [pair for pair in options if pair[0] in _OPTIONS]
    others = urllib.parse.urlencode([pair for pair in options if pair not in own])
    seconds, lanes = _own_options(shown, own)
    inner = f"{scheme}://{parts.netloc}{parts.path}" + (f"?{others}" if others else "")
    return RedisPlace(inner, shown, is_cluster, lanes=lanes, **seconds)


def _own_options(
    shown: str, pairs: Sequence[tuple[str, str]]
) -> tuple[dict[str, float], int]:
    given = dict(pairs)
    if len(given) < len(pairs):
        raise _wrong(shown, "it says something twice")
    try:
        lanes = int(given.pop("lanes", _LANES))
        seconds = {name: float(text) for name, text in given.items()}
    except ValueError:
        raise _wrong(shown, "an option is no number") from None
    for name, value in seconds.items():
        if not 0.001 <= value < float("inf"):
            raise _wrong(shown, f"{name} is a time in seconds")
    if not LEAST_LANES <= lanes <= MAX_LANES:
        raise _wrong(shown, f"lanes are {LEAST_LANES} to {MAX_LANES}")
    return seconds, lanes


def _unreadable(url: str) -> ConfigError:
    return ConfigError(
        f"{redacted(url)!r} is no Redis tier: its host and port cannot be read",
        hint="in a password write / as %2F, ? as %3F, # as %23 and @ as %40",
    )


def _wrong(shown: str, why: str) -> ConfigError:
    return ConfigError(f"{shown!r} is no Redis tier: {why}", hint=_HINT)

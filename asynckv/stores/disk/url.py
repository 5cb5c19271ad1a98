"""``disk:///var/kv?max=100GiB``: where a disk tier is, and how large it may be."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import Final

from asynckv.errors import ConfigError
from asynckv.types import parse_bytes

__all__ = ("LEAST_MAX_BYTES", "parse_disk_url")

LEAST_MAX_BYTES: Final = 2**20
_HINT: Final = "write disk:///var/kv?max=100GiB"


def parse_disk_url(url: str) -> tuple[Path, int]:
    """Return what the URL of a disk tier says: a directory, and the bound on its files.

    :raises ConfigError: it is none, or says nothing of use
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "disk":
        raise _wrong(url, f"its scheme is {parts.scheme!r}")
    if parts.netloc:
        raise _wrong(url, f"{parts.netloc!r} is no part of a path: three slashes")
    path = Path(urllib.parse.unquote(parts.path))
    if not path.is_absolute() or path == Path("/"):
        raise _wrong(url, "it names no directory")
    try:
        pairs = urllib.parse.parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)
        )
        options = dict(pairs)
        if parts.fragment or len(options) < len(pairs) or set(options) != {"max"}:
            raise _wrong(url, "it has one option, max, and needs it")
        max_bytes = parse_bytes(options["max"])
    except ValueError as exc:
        raise _wrong(url, str(exc)) from exc
    return path, max_bytes


def _wrong(url: str, why: str) -> ConfigError:
    return ConfigError(f"{url!r} is no disk tier: {why}", hint=_HINT)

"""``s3://bucket/prefix?region=eu-west-1`` and ``file:///mnt/kv``: where objects are.

An URL has no credentials: they come from the environment, or from who runs the
machine. So nothing that it is repeated in tells any.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from typing import Final

from asynckv.errors import ConfigError

__all__ = ("PATIENCE_S", "ObjectPlace", "parse_object_url")

PATIENCE_S: Final = 2.0
_MAX_RETRIES: Final = 1
_FILE_OPTIONS: Final = frozenset({"patience"})
_S3_OPTIONS: Final = _FILE_OPTIONS | {
    *("region", "endpoint", "allow_http", "skip_signature", "retries"),
}
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}
_HINT: Final = (
    "write s3://bucket/prefix?region=eu-west-1, or file:///mnt/kv; options of s3 are "
    "region, endpoint, allow_http, skip_signature, retries (0 or 1) and patience "
    "(seconds), file has patience"
)


@dataclasses.dataclass(frozen=True)
class ObjectPlace:
    """A bucket, or, without one, the local files; and what all keys there begin with.

    ``name`` is the URL without its options, for people to read.
    """

    name: str
    bucket: str
    prefix: str
    region: str | None = None
    endpoint: str | None = None
    allow_http: bool = False
    skip_signature: bool = False
    retries: int = _MAX_RETRIES
    patience_s: float = PATIENCE_S


def parse_object_url(url: str) -> ObjectPlace:
    """Return what the URL of an object tier says.

    :raises ConfigError: it is none, or says nothing of use
    """
    parts = urllib.parse.urlsplit(url)
    # A key may have a slash, at which what looks like a host ends.
    if "@" in parts.netloc or (":" in parts.netloc and "@" in url):
        raise _wrong(f"{parts.scheme}://", "credentials do not belong in an URL")
    name = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    prefix = urllib.parse.unquote(parts.path).strip("/")
    if parts.scheme not in ("s3", "file"):
        raise _wrong(name, f"its scheme is {parts.scheme!r}")
    segments = prefix.split("/") if prefix else []
    if parts.fragment or any(one in ("", ".", "..") for one in segments):
        raise _wrong(name, "its path is none that keys can begin with")
    if parts.scheme == "s3":
        if not parts.netloc:
            raise _wrong(name, "it names no bucket")
        told = _options(name, parts.query, _S3_OPTIONS)
        return ObjectPlace(
            *(name, parts.netloc, prefix, told.get("region"), _endpoint(name, told)),
            allow_http=_flag(name, told, "allow_http"),
            skip_signature=_flag(name, told, "skip_signature"),
            retries=_retries(name, told),
            patience_s=_patience_s(name, told),
        )
    if parts.netloc:
        raise _wrong(name, f"{parts.netloc!r} is no part of a path: three slashes")
    if not prefix:
        raise _wrong(name, "it names no directory")
    told = _options(name, parts.query, _FILE_OPTIONS)
    return ObjectPlace(name, "", prefix, patience_s=_patience_s(name, told))


def _options(name: str, query: str, known: frozenset[str]) -> dict[str, str]:
    try:
        pairs = urllib.parse.parse_qsl(
            query, keep_blank_values=True, strict_parsing=bool(query)
        )
    except ValueError:
        raise _wrong(name, "its options are not written name=value") from None
    options = dict(pairs)
    if unknown := sorted(set(options) - known):
        raise _wrong(name, f"it has no option {unknown[0]!r}")
    if len(options) < len(pairs):
        raise _wrong(name, "an option is there twice")
    return options


def _endpoint(name: str, options: dict[str, str]) -> str | None:
    endpoint = options.get("endpoint")
    if endpoint is None:
        return None
    parts = urllib.parse.urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in endpoint:
        raise _wrong(name, "an endpoint is https://host:port, and no more")
    if parts.scheme == "http" and not _flag(name, options, "allow_http"):
        raise _wrong(name, "its endpoint is without TLS: that needs allow_http=true")
    return endpoint


def _flag(name: str, options: dict[str, str], option: str) -> bool:
    told = options.get(option, "false")
    if told not in _FLAGS:
        raise _wrong(name, f"{option} is true or false, not {told!r}")
    return _FLAGS[told]


def _retries(name: str, options: dict[str, str]) -> int:
    told = options.get("retries", str(_MAX_RETRIES))
    if told not in ("0", "1"):
        raise _wrong(name, f"retries is 0 or 1, not {told!r}: others wait meanwhile")
    return int(told)


def _patience_s(name: str, options: dict[str, str]) -> float:
    told = options.get("patience", str(PATIENCE_S))
    try:
        patience_s = float(told)
    except ValueError:
        patience_s = 0.0
    if not 0 < patience_s <= 3600:
        raise _wrong(name, f"patience is in seconds, not {told!r}")
    return patience_s


def _wrong(name: str, why: str) -> ConfigError:
    return ConfigError(f"{name} is no object tier: {why}", hint=_HINT)

"""What a URL says about where a peer is. Parsed once, here."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import urllib.parse
from typing import Final, Literal, TypeAlias

from asynckv.errors import ConfigError

__all__ = ("LOOPBACK", "Address", "Scheme", "host_in", "parse_url")

Scheme: TypeAlias = Literal["tcp", "tls", "unix", "mem"]

LOOPBACK: Final = "127.0.0.1"
"""This very host, and nobody else."""
_EXAMPLES: Final = (
    "tcp://127.0.0.1:7000, tls://kv.example:7000, unix:///run/asynckv.sock, mem://name"
)
# sun_path has 108 bytes, of which the last is the end of the string.
_MAX_PATH_BYTES: Final = 107


@dataclasses.dataclass(frozen=True)
class Address:
    """Where to listen or dial; ``payload`` forces a payload path if it is set.

    ``place`` is the path of a unix socket or the name of a listener in memory,
    ``name`` what a certificate has to be for if that is not ``host``.
    """

    scheme: Scheme
    host: str = ""
    port: int = 0
    place: str = ""
    payload: str = ""
    name: str = ""

    def __str__(self) -> str:
        if self.scheme in ("tcp", "tls"):
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"{self.scheme}://{host}:{self.port}"
        return f"{self.scheme}://{urllib.parse.quote(os.fsencode(self.place))}"


def host_in(name: object) -> str:
    """Return the IP address in what a socket says of one of its ends.

    Empty if that is not on a network: then it is on this host.
    """
    if not isinstance(name, tuple):
        return ""
    ip = ipaddress.ip_address(name[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def parse_url(url: str) -> Address:
    """Return what ``url`` says. An empty host is this host's loopback.

    :raises ConfigError: it is no URL that a link can use
    :raises TypeError: it is no str
    """
    if not isinstance(url, str):
        raise TypeError(f"a URL is a str, not {url!r:.40}")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ConfigError(f"{url!r} is not a URL: {exc}", hint=_EXAMPLES) from exc
    has_scheme = url.lower().startswith(f"{parts.scheme}://")
    if not has_scheme or not url.isprintable():
        raise ConfigError(f"{url!r} is not a URL", hint=_EXAMPLES)
    payload = _payload_of(url, parts.query)
    if parts.username is not None or parts.fragment:
        raise ConfigError(f"{url!r}: no user and no fragment belong in it")
    if parts.scheme in ("tcp", "tls"):
        if parts.path.strip("/"):
            raise ConfigError(
                f"{url!r}: a {parts.scheme} URL has no path", hint=_EXAMPLES
            )
        if port is None:
            raise ConfigError(
                f"{url!r} has no port", hint="a listener takes a free one with :0"
            )
        host = parts.hostname or LOOPBACK
        # Not looked up: it means this very host, and names go through a resolver.
        name, host = ("localhost", LOOPBACK) if host == "localhost" else ("", host)
        if parts.scheme == "tls":
            return Address("tls", host=host, port=port, payload=payload, name=name)
        return Address("tcp", host=host, port=port, payload=payload)
    if parts.scheme == "unix":
        return Address("unix", place=_path_of(url, parts), payload=payload)
    if parts.scheme == "mem":
        place = _unquoted(parts.netloc + parts.path)
        return Address("mem", place=place, payload=payload)
    raise ConfigError(f"{url!r}: no such scheme here", hint=_EXAMPLES)


def _path_of(url: str, parts: urllib.parse.SplitResult) -> str:
    path = _unquoted(parts.path)
    if parts.netloc or not path.startswith("/") or "\0" in path:
        raise ConfigError(
            f"{url!r} needs an absolute path", hint="unix:///run/asynckv.sock"
        )
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"{url!r}: a unix socket's path has at most {_MAX_PATH_BYTES} bytes",
            hint="put it in a shorter directory",
        )
    return path


def _unquoted(text: str) -> str:
    """Undo the percent signs; a file's name need not be UTF-8."""
    return urllib.parse.unquote(text, errors="surrogateescape")


def _payload_of(url: str, query: str) -> str:
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(pairs) > len(options):
        raise ConfigError(f"{url!r} has an option twice", hint="write each once")
    payload = options.pop("payload", "")
    if options:
        raise ConfigError(
            f"{url!r}: unknown option {next(iter(options))!r}",
            hint="the only one is ?payload=",
        )
    return payload

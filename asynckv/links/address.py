"""What a URL says about where a peer is, and what is asked for there.

What is sent decides what a model says and tells what it was asked. So beyond this host
nobody is trusted for being there: both who listens and who dials must prove themselves,
and must say so explicitly if the bytes travel in the clear. The same is asked of who
dials, because it sends as much as it receives, and because one wrong letter in a host
name would hand prompts to a stranger.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import os
import urllib.parse
from typing import Final, Literal, TypeAlias

from asynckv.errors import ConfigError
from asynckv.observability.lines import redacted
from asynckv.security.keyring import Keyring
from asynckv.security.names import is_host

__all__ = (
    "LOOPBACK",
    "Address",
    "Scheme",
    "check_exposure",
    "host_in",
    "is_beyond_this_host",
    "parse_url",
)


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
    # Of a store's tier, in the wrong place, it may have a password.
    shown = redacted(url) if "@" in url else url
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as exc:
        why = "" if "@" in url else f": {exc}"
        raise ConfigError(f"{shown!r} is not a URL{why}", hint=_EXAMPLES) from None
    has_scheme = url.lower().startswith(f"{parts.scheme}://")
    if not has_scheme or not url.isprintable():
        raise ConfigError(f"{shown!r} is not a URL", hint=_EXAMPLES)
    payload = _payload_of(shown, parts.query)
    if parts.username is not None or parts.fragment:
        raise ConfigError(f"{shown!r}: no user and no fragment belong in it")
    if parts.scheme in ("tcp", "tls"):
        return _network_address(shown, parts, port, payload)
    if parts.scheme == "unix":
        return Address("unix", place=_path_of(shown, parts), payload=payload)
    if parts.scheme == "mem":
        place = _unquoted(parts.netloc + parts.path)
        return Address("mem", place=place, payload=payload)
    raise ConfigError(f"{shown!r}: no such scheme here", hint=_EXAMPLES)


def _network_address(
    shown: str, parts: urllib.parse.SplitResult, port: int | None, payload: str
) -> Address:
    if parts.path.strip("/"):
        raise ConfigError(
            f"{shown!r}: a {parts.scheme} URL has no path", hint=_EXAMPLES
        )
    if port is None:
        raise ConfigError(
            f"{shown!r} has no port", hint="a listener takes a free one with :0"
        )
    host = parts.hostname or LOOPBACK
    if not is_host(host):
        raise ConfigError(
            f"{shown!r}: {host!r} is no host",
            hint="of a name each part, between two dots, has 1 to 63 characters",
        )
    if "%" in host:
        raise ConfigError(
            f"{shown!r}: a host with % in it is not taken",
            hint="instead of an address of one interface, as fe80::1%eth0, write "
            "another one of that host, or its name",
        )
    # Not looked up: it means this very host, and names go through a resolver.
    name, host = ("localhost", LOOPBACK) if host == "localhost" else ("", host)
    if parts.scheme == "tls":
        return Address("tls", host=host, port=port, payload=payload, name=name)
    return Address("tcp", host=host, port=port, payload=payload)


def _path_of(shown: str, parts: urllib.parse.SplitResult) -> str:
    path = _unquoted(parts.path)
    if parts.netloc or not path.startswith("/") or "\0" in path:
        raise ConfigError(
            f"{shown!r} needs an absolute path", hint="unix:///run/asynckv.sock"
        )
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"{shown!r}: a unix socket's path has at most {_MAX_PATH_BYTES} bytes",
            hint="put it in a shorter directory",
        )
    return path


def _unquoted(text: str) -> str:
    """Undo the percent signs; a file's name need not be UTF-8."""
    return urllib.parse.unquote(text, errors="surrogateescape")


def _payload_of(shown: str, query: str) -> str:
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(pairs) > len(options):
        raise ConfigError(f"{shown!r} has an option twice", hint="write each once")
    payload = options.pop("payload", "")
    if options:
        raise ConfigError(
            f"{shown!r}: unknown option {next(iter(options))!r}",
            hint="the only one is ?payload=",
        )
    return payload


logger = logging.getLogger(__name__)


def is_beyond_this_host(address: Address) -> bool:
    """Whether other machines can be at the other end. A name may mean any host."""
    if address.scheme in ("unix", "mem"):
        return False
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        return True
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return not ip.ipv4_mapped.is_loopback
    return not ip.is_loopback


def check_exposure(address: Address, keyring: Keyring) -> None:
    """Refuse to listen at, or to dial, what is not protected enough.

    Plaintext that was allowed is warned of, once a keyring.

    :raises ConfigError: the other end may be another machine, and there is no
        authentication, or no TLS and no ``allow_plaintext``; or certificates are
        given where they are not used, or are missing
    """
    is_tls = address.scheme == "tls"
    if is_tls != keyring.has_tls:
        raise ConfigError(
            f"{address} needs certificates" if is_tls else f"{address} is no TLS",
            hint="tls:// and tls=asynckv.TLS(...) belong together",
        )
    if is_tls or not is_beyond_this_host(address):
        return
    if not keyring.has_secret:
        raise ConfigError(
            f"{address} is beyond this host, and nobody there would have to prove "
            "who it is",
            hint="use tls://, or pass secret_file=...; on one host use unix://",
        )
    if not keyring.allow_plaintext:
        raise ConfigError(
            f"{address} is beyond this host, and the bytes would travel in the clear",
            hint="use tls://, or pass allow_plaintext=True if that network is trusted",
        )
    if not keyring.was_warned:
        keyring.was_warned = True
        logger.warning(
            "%s is beyond this host and plaintext: whoever is in between can read "
            "and change what is sent",
            address,
        )

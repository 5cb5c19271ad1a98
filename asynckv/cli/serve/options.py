"""The options of ``asynckv serve``, each checked where it is read.

So whatever is wrong is said together with where it came from: a flag, the environment
or a file.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from cyclopts import Parameter

from asynckv.cli.keys import Fingerprint
from asynckv.cli.sources import converter, converter_of_each
from asynckv.errors import ConfigError
from asynckv.observability.lines import without_secrets
from asynckv.types import parse_bytes

__all__ = ("LogLevel", "ServeOptions")

_MOST_S: Final = 86_400

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


def _tier(url: str) -> str:
    """Return the URL of a tier that can be opened; that is done later."""
    from asynckv.stores.tiered import open_tier

    try:
        open_tier(url)
    except ConfigError as exc:
        raise ValueError(without_secrets(str(exc), url)) from None
    return url


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= _MOST_S:
        raise ValueError(f"{text} is not 0 to {_MOST_S} seconds")
    return seconds


def _tenant(text: str) -> tuple[str, str]:
    tenant, is_given, certified = text.partition("=")
    if not (tenant and is_given and certified):
        raise ValueError(f"{text!r} is not NAME=CERTIFICATE_NAME")
    return tenant, certified


_Size: TypeAlias = Annotated[int | None, Parameter(converter=converter(parse_bytes))]
_Seconds: TypeAlias = Annotated[float, Parameter(converter=converter(_seconds))]


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What is served, and how."""

    config: Path | None = None
    """A file of these options: TOML, as `store = "8GiB"`, or JSON. What is in the
    environment counts before it, and flags before that."""

    listen: str = "tcp://127.0.0.1:14579"
    """The address to serve at; port 0 takes a free one."""

    lookup: _Size = None
    """Serve a lookup buffer of at most so many bytes: 2GiB, 500MB. It or --store is
    needed."""

    store: _Size = None
    """Serve a store of at most so many bytes of memory."""

    tier: Annotated[
        tuple[str, ...],
        Parameter(converter=converter_of_each(_tier), n_tokens=1, negative=()),
    ] = ()
    """Where the store keeps values below its memory: `disk:///var/kv?max=100GiB`.
    May be repeated: the first one is asked first."""

    admit: Literal["always", "second_use"] = "always"
    """Which values tiers get: all, or what is used again after it was put."""

    namespace: str = ""
    """Keeps keys apart from those of others on the same tiers; keeps nobody out."""

    tenant: Annotated[
        tuple[tuple[str, str], ...],
        Parameter(converter=converter_of_each(_tenant), n_tokens=1, negative=()),
    ] = ()
    """A tenant of the store, and the name that its peers are certified for, as
    `a=engines.a.example`. May be repeated: each finds its own values alone."""

    fingerprint: Fingerprint = None
    """The model that the KV belongs to: its name, or JSON of a fingerprint's fields.
    Peers of another one are refused."""

    http: str | None = None
    """Where to answer `/healthz`, `/readyz` and `/metrics`, as 127.0.0.1:9464. Whoever
    reaches it is answered."""

    drain_s: _Seconds = 30.0
    """So long an end by SIGTERM or Ctrl-C may take: consumers take what is left, and
    tiers what waits for them."""

    log_level: LogLevel = "info"
    """The least that is logged: debug, info, warning or error."""

    def check(self) -> None:
        """Refuse options that mean nothing together.

        :raises ConfigError: what is missing, or is one too many
        """
        if self.lookup is None and self.store is None:
            raise ConfigError("nothing to serve", hint="--store 2GiB, --lookup 2GiB")
        if self.tier and self.store is None:
            raise ConfigError("--tier is below a store", hint="add --store 2GiB")
        if len(dict(self.tenant)) < len(self.tenant):
            raise ConfigError("--tenant has the same tenant twice")
        if not self.tier and (self.namespace or self.admit != "always"):
            raise ConfigError(
                "--namespace and --admit are for tiers", hint="add --tier"
            )

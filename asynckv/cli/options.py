"""Options of commands: where they come from, who a command is to its peers, of serve.

A flag counts before ``ASYNCKV_STORE`` of the environment, that before ``store`` in the
file that ``--config`` names, and that before the default. Whatever is wrong is said
together with where it came from. What needs torch is imported when it is used, so that
``--help`` is quick.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from cyclopts import App, ArgumentCollection, Parameter, Token
from cyclopts.config import Dict, Env

from asynckv.errors import ConfigError
from asynckv.observability.lines import without_secrets
from asynckv.security.shared_secret import SECRET_VARIABLE, secret_file_from
from asynckv.security.tls import TLS
from asynckv.types import KVFingerprint, parse_bytes

if TYPE_CHECKING:
    from asynckv import Peer

__all__ = (
    "ENVIRONMENT",
    "NO_KEY_OPTIONS",
    "Fingerprint",
    "KeyOptions",
    "LogLevel",
    "ServeOptions",
    "converter",
    "converter_of_each",
    "from_file",
    "in_flags",
)

_T = TypeVar("_T")

ENVIRONMENT: Final = Env("ASYNCKV_", command=False)
"""``ASYNCKV_DRAIN_S`` is ``--drain-s``; of a list the items are apart by spaces."""


def from_file(
    app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Take options from the file that ``--config`` names, if it was given.

    TOML, or JSON where the name ends in ``.json``. Its keys are the options' names.

    :raises ConfigError: it cannot be read, or names another file
    """
    for argument in arguments:
        if argument.name == "--config" and argument.tokens:
            path = Path(argument.tokens[-1].value)
            found = _read(path)
            if isinstance(found, dict) and "config" in found:
                raise ConfigError(f"config is no option in a file, and is in {path}")
            # Without commands: the keys are at the top, also one named as a command.
            Dict(found, source=str(path))(app, (), arguments)


def converter(make: Callable[[str], _T]) -> Callable[[object, Sequence[Token]], _T]:
    """Return how cyclopts makes an option of one text, if that is not by its type.

    ``make`` raises ``ValueError`` for what is wrong; what is said then names the file.
    """
    return lambda hint, tokens: _made(make, tokens[0])


def converter_of_each(
    make: Callable[[str], _T],
) -> Callable[[object, Sequence[Token]], tuple[_T, ...]]:
    """As :func:`converter`, for an option that may be repeated.

    An empty list of a file, or an empty variable, is one empty text.
    """
    return lambda hint, tokens: tuple(
        _made(make, token) for token in tokens if token.value
    )


def _made(make: Callable[[str], _T], token: Token) -> _T:
    try:
        return make(token.value)
    except ValueError as exc:
        is_named = token.source in ("cli", ENVIRONMENT.source)
        raise ValueError(f"{exc}{'' if is_named else f', in {token.source}'}") from exc


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as exc:
        why = exc.strerror or str(exc)
    except (ValueError, RecursionError) as exc:  # the latter: nested too deeply
        why = str(exc)
    raise ConfigError(
        f"{str(path)!r} cannot be read: {why}",
        hint='write lines as store = "8GiB", or JSON in a file that ends in .json',
    )


def _fingerprint(text: str) -> KVFingerprint:
    if not text.startswith("{"):
        return KVFingerprint(model=text)
    try:
        return msgspec.json.decode(text, type=KVFingerprint)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"not a fingerprint: {exc}") from exc


Fingerprint: TypeAlias = Annotated[
    KVFingerprint | None,
    Parameter(converter=converter(_fingerprint), accepts_keys=False, n_tokens=1),
]
"""A model's name, or JSON of a fingerprint's fields."""


def _secret_file(hint: object, tokens: Sequence[Token]) -> Path:
    source = tokens[0].source
    if source == ENVIRONMENT.source:
        secret_file_from(os.environ)  # refuses a second secret there
    elif source != "cli" and SECRET_VARIABLE in os.environ:
        raise ConfigError(
            f"both secret_file in {source} and {SECRET_VARIABLE} are set",
            hint="leave one of them out",
        )
    return Path(tokens[0].value)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """As ``serve`` and ``connect`` take them."""

    secret_file: Annotated[Path | None, Parameter(converter=_secret_file)] = None
    """The secret that all peers share."""

    certificate: Path | None = None
    """This side's certificate for ``tls://``, with --key and --ca."""

    key: Path | None = None
    """The key of the certificate."""

    ca: Path | None = None
    """The authorities that certify peers."""

    allow_plaintext: Annotated[bool, Parameter(negative=())] = False
    """Allow ``tcp://`` beyond this host."""

    @property
    def tls(self) -> TLS | None:
        """The certificates that are named; ``None`` if there are none.

        :raises ConfigError: only some of them are given
        """
        certificate, key, ca = self.certificate, self.key, self.ca
        if certificate is None and key is None and ca is None:
            return None
        if certificate is None or key is None or ca is None:
            raise ConfigError("--certificate, --key and --ca belong together")
        return TLS(certificate=certificate, key=key, ca=ca)

    def connect(self, url: str, fingerprint: KVFingerprint | None) -> Peer:
        """Return a connection to enter, which is not made again when it is cut.

        :raises ConfigError: these options do not go together
        """
        from asynckv import connect

        return connect(
            url,
            fingerprint=fingerprint,
            reconnect_s=0,
            secret_file=self.secret_file,
            tls=self.tls,
            allow_plaintext=self.allow_plaintext,
        )


NO_KEY_OPTIONS: Final = KeyOptions()

_FLAGS: Final = {
    r"\bsecret_file(=\.\.\.)?": "--secret-file",
    r"\ballow_plaintext=True": "--allow-plaintext",
    r"\btls=((asynckv\.)?TLS\(\.\.\.\))?": "--certificate, --key and --ca",
}


def in_flags(error: Exception) -> str:
    """Return what ``error`` says; its hint names flags where it named arguments."""
    hint = typed = getattr(error, "hint", "")
    for argument, flag in _FLAGS.items():
        typed = re.sub(argument, flag, typed)
    return str(error).replace(f"({hint})", f"({typed})")


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

    def check(self, keys: KeyOptions) -> None:
        """Refuse options that mean nothing, with ``keys``.

        :raises ConfigError: what is missing, is one too many, or is no address
        """
        from asynckv.cli.serve.http import host_and_port
        from asynckv.links.address import parse_url

        tls = keys.tls
        if parse_url(self.listen).scheme == "mem":
            raise ConfigError(
                "--listen is mem://, and nobody else is in this process",
                hint="tcp://127.0.0.1:14579, unix:///run/asynckv.sock",
            )
        if self.http is not None:
            host_and_port(self.http)
        if self.lookup is None and self.store is None:
            raise ConfigError("nothing to serve", hint="--store 2GiB, --lookup 2GiB")
        if self.tier and self.store is None:
            raise ConfigError("--tier is below a store", hint="add --store 2GiB")
        if self.tenant and tls is None:
            raise ConfigError(
                "--tenant is of peers with certificates",
                hint="add --certificate, --key and --ca",
            )
        if len(dict(self.tenant)) < len(self.tenant):
            raise ConfigError("--tenant has the same tenant twice")
        if not self.tier and (self.namespace or self.admit != "always"):
            raise ConfigError(
                "--namespace and --admit are for tiers", hint="add --tier"
            )

"""What ``--kv-transfer-config`` says, checked, and as plain values for lower floors.

Lower floors never see a config: whoever opens them passes keyword arguments.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from asynckv.errors import ConfigError
from asynckv.security.tls import TLS
from asynckv.types import KVFingerprint, parse_bytes

__all__ = ("KVLoadFailurePolicy", "KVRole", "KVTransferConfig", "check_config")

KVRole: TypeAlias = Literal["kv_producer", "kv_consumer", "kv_both"]
KVLoadFailurePolicy: TypeAlias = Literal["fail", "recompute"]

_DEFAULT_PORT: Final = 14579
_DEFAULT_STORE_TIMEOUT_S: Final = 300.0
_DEFAULT_WAITING_BYTES: Final = "256MiB"
_ENV_PREFIX: Final = "ASYNCKV_"
_RANGES: Final[dict[str, tuple[int, int | None]]] = {
    "kv_buffer_size": (1, None),
    "kv_rank": (0, None),
    "kv_parallel_size": (1, None),
    "kv_port": (0, 65535),
}
"""The least and the most that these fields may be."""
_DEVICE: Final = re.compile(r"(cpu|cuda(:(0|[1-9][0-9]{0,3}))?)\Z")


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's ``KVTransferConfig``: its names and defaults, old fields and new.

    ``kv_buffer_size`` also takes ``"1e9"`` or ``"2GiB"``. ``kv_buffer_device`` is
    where a buffer's memory is. A ``kv_producer`` listens on ``kv_ip`` and
    ``kv_port``, a ``kv_consumer`` connects to them.

    ``kv_connector_extra_config`` may hold, for asynckv itself, ``port_offset``
    (added to ``kv_port``), ``store_timeout`` (how many seconds a peer may take
    to be there), ``peer_url`` (whom a ``kv_both`` asks), ``fingerprint`` (what
    model the entries belong to), ``secret_file``, ``allow_plaintext`` and
    ``max_waiting_bytes`` (as :func:`asynckv.serve` takes them), ``local_rank``
    (whose GPU ``"cuda"`` is), and, for ``tls://``, ``tls``: an object of the fields
    of :class:`asynckv.TLS`.

    :raises ConfigError: values that cannot work; it names each
    """

    kv_connector: str | None = None
    engine_id: str | None = None
    kv_buffer_device: str = "cpu"
    kv_buffer_size: int | float | str = 1e9
    kv_role: KVRole | None = None
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = "127.0.0.1"
    kv_port: int = _DEFAULT_PORT
    kv_connector_extra_config: dict[str, object] = {}
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: KVLoadFailurePolicy = "fail"

    def __post_init__(self) -> None:
        wrong = _wrong_values(msgspec.structs.asdict(self))
        if wrong:
            raise ConfigError.of(wrong)
        if self.kv_connector is not None and self.kv_role is None:
            raise ConfigError(
                f"kv_connector is {self.kv_connector!r} and kv_role is not set",
                hint='set kv_role to "kv_producer", "kv_consumer" or "kv_both"',
            )

    @classmethod
    def from_json(cls, text: str) -> KVTransferConfig:
        """Read the exact string that ``--kv-transfer-config`` takes.

        :raises ConfigError: it is no JSON object, or fields cannot work: it names each
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as exc:  # the latter: nested too deeply
            raise ConfigError(
                f"the configuration is not JSON: {exc}",
                hint='write it as \'{"kv_role": "kv_producer"}\'',
            ) from exc
        if not isinstance(fields, dict):
            raise ConfigError(
                f"the configuration is a JSON {type(fields).__name__}",
                hint="it is an object: {...}",
            )
        if wrong := [*_wrong_names(fields), *_wrong_values(fields)]:
            raise ConfigError.of(wrong)
        return cls(**fields)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> KVTransferConfig:
        """Read ``ASYNCKV_<FIELD>`` for every field (``ASYNCKV_KV_PORT=14580``).

        ``environ`` is the process's unless given. Names like
        ``ASYNCKV_KV_...`` that are no field are refused.

        :raises ConfigError: fields cannot work; it names each
        """
        found = _fields_in(os.environ if environ is None else environ)
        del environ  # a traceback that shows variables would show a secret in it
        wrong = _wrong_names(name for name in found if name.startswith("kv_"))
        fields: dict[str, Any] = {}
        for name in (field for field in cls.__struct_fields__ if field in found):
            try:
                fields[name] = _from_text(name, found[name])
            except ConfigError as exc:
                wrong.append(exc)
        if wrong := [*wrong, *_wrong_values(fields)]:
            raise ConfigError.of(wrong)
        return cls(**fields)

    @property
    def is_kv_producer(self) -> bool:
        """Does this role insert? The role alone decides, with or without connector."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Does this role select?"""
        return self.kv_role in ("kv_consumer", "kv_both")

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Is there any role at all?"""
        return self.kv_role is not None

    def get_from_extra_config(self, key: str, default: object) -> object:
        """Return ``kv_connector_extra_config[key]``, or ``default`` without it."""
        return self.kv_connector_extra_config.get(key, default)

    @property
    def max_bytes(self) -> int:
        """``kv_buffer_size`` in whole bytes."""
        return parse_bytes(self.kv_buffer_size)

    @property
    def url(self) -> str:
        """``tcp://kv_ip:kv_port``, with ``port_offset`` added to the port.

        With ``tls`` it is ``tls://``.

        :raises ConfigError: the offset is no whole number, or leaves the range
        """
        offset: int = self._extra("port_offset", int, 0, "a whole number")
        port = self.kv_port + offset
        _check_range("kv_port + port_offset", port, 0, 65535)
        host = f"[{self.kv_ip}]" if ":" in self.kv_ip else self.kv_ip
        scheme = "tcp" if self.tls is None else "tls"
        return f"{scheme}://{host}:{port}"

    @property
    def store_timeout_s(self) -> float:
        """How long a peer may take to be there.

        :raises ConfigError: it is no positive number
        """
        seconds: float = self._extra(
            "store_timeout", float, _DEFAULT_STORE_TIMEOUT_S, "a number of seconds"
        )
        if not 0 < seconds < math.inf:
            raise ConfigError(
                f"store_timeout is {seconds:g}",
                hint="it is a finite number of seconds, more than 0",
            )
        return seconds

    @property
    def local_rank(self) -> int | None:
        """Which GPU of this host ``"cuda"`` is; ``None``: what ``LOCAL_RANK`` says.

        :raises ConfigError: it is not the number of a rank
        """
        what = "the number of a rank"
        given: int | str | None = self._extra(
            "local_rank", int | str | None, None, what
        )
        if given is not None and not str(given).isdecimal():
            raise ConfigError(f"local_rank is {given!r}, not {what}")
        return None if given is None else int(given)

    @property
    def device(self) -> str:
        """``kv_buffer_device``, as ``device=`` of a pipe or a group takes it.

        :raises ConfigError: :attr:`local_rank` is not the number of a rank
        """
        rank, name = self.local_rank, self.kv_buffer_device
        return name if name != "cuda" or rank is None else f"cuda:{rank}"

    def check_device(self, caches_on: str | None = None) -> None:
        """Refuse a ``kv_buffer_device`` that is none, or is not where caches are.

        Any caches go with ``"cpu"``, and with ``"cuda"`` those on the GPU of
        :attr:`local_rank` or ``LOCAL_RANK``; if neither is set, on any.

        :raises ConfigError: there is no such device, or ``caches_on`` is another
        """
        name = self.kv_buffer_device
        if not _DEVICE.match(name):
            raise ConfigError(
                f"kv_buffer_device {name!r} is unknown",
                hint='write "cpu", "cuda" or "cuda:1"',
            )
        if name == "cuda":
            name = self._named_gpu()
        if name == "cpu" or caches_on is None or caches_on == name:
            return
        if name != "cuda" or not caches_on.startswith("cuda"):
            raise ConfigError(
                f"kv_buffer_device is {name}, and the caches are on {caches_on}",
                hint='write "cpu": then caches may be on any device',
            )

    @property
    def peer_url(self) -> str | None:
        """Whom the node asks: the ``peer_url`` given, or :attr:`url` for a consumer.

        ``None`` for a mere producer, and for a ``kv_both`` that was not told.

        :raises ConfigError: it is no text
        """
        given: str = self._extra(
            "peer_url", str, "", "a URL like 'tcp://10.0.0.2:14579'"
        )
        if not self.is_kv_consumer:
            return None
        return given or (self.url if self.kv_role == "kv_consumer" else None)

    @property
    def fingerprint(self) -> KVFingerprint | None:
        """What model the entries belong to.

        :raises ConfigError: it is neither a model's name nor a fingerprint's fields
        """
        given: dict[str, str] | str | None = self._extra(
            "fingerprint",
            dict[str, str] | str | None,
            None,
            "a model's name, or an object of texts",
        )
        try:
            return KVFingerprint.of(given)
        except ValueError as exc:
            fields = ", ".join(KVFingerprint.__struct_fields__)
            raise ConfigError(
                f"kv_connector_extra_config.fingerprint: {exc}",
                hint=f"it is a model's name, or an object of {fields}",
            ) from exc

    @property
    def secret_file(self) -> str | None:
        """Where the secret is that this node shares with its peers.

        :raises ConfigError: it is no text
        """
        given: str | None = self._extra("secret_file", str | None, None, "a path")
        return given

    @property
    def tls(self) -> TLS | None:
        """The certificates of this node and of its peers.

        :raises ConfigError: a field is missing, or is none
        """
        fields = ", ".join(_TlsFields.__struct_fields__)
        given: _TlsFields | None = self._extra(
            "tls", _TlsFields | None, None, f"an object of {fields}"
        )
        return None if given is None else TLS(**msgspec.structs.asdict(given))

    @property
    def allow_plaintext(self) -> bool:
        """Whether bytes may leave this host in the clear.

        :raises ConfigError: it is neither true nor false
        """
        given: bool = self._extra("allow_plaintext", bool, False, "true or false")
        return given

    @property
    def max_waiting_bytes(self) -> int:
        """How much requests that wait may keep beside the buffers.

        :raises ConfigError: it is no number of bytes
        """
        what = "bytes: 1e9, '1e9' or '2GiB'"
        given: int | float | str = self._extra(
            "max_waiting_bytes", int | float | str, _DEFAULT_WAITING_BYTES, what
        )
        try:
            return parse_bytes(given)
        except ValueError as exc:
            raise ConfigError(
                f"kv_connector_extra_config.max_waiting_bytes: {exc}",
                hint=f"it is {what}",
            ) from exc

    def _named_gpu(self) -> str:
        """Return which GPU ``"cuda"`` is, by its number if a rank is known."""
        rank = os.environ.get("LOCAL_RANK") if self.device == "cuda" else None
        if rank is None:
            return self.device
        if not rank.isdecimal():
            raise ConfigError(f"LOCAL_RANK is {rank!r}, not the number of a rank")
        return f"cuda:{int(rank)}"

    def _extra(self, key: str, kind: Any, default: Any, what: str) -> Any:
        value = self.kv_connector_extra_config.get(key, default)
        try:
            return msgspec.convert(value, kind)
        except (msgspec.ValidationError, UnicodeError) as exc:
            # Not all of an object: one that is wrong may say a password, or a secret.
            why = f": {exc}" if isinstance(value, dict) else f" is {value!r}"
            raise ConfigError(
                f"kv_connector_extra_config.{key}{why}", hint=f"it is {what}"
            ) from exc


class _TlsFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What JSON can say of a :class:`TLS`."""

    certificate: str
    key: str
    ca: str
    allowed_peers: tuple[str, ...] = ()
    server_name: str | None = None


def _wrong_values(fields: Mapping[str, object]) -> list[ConfigError]:
    """Say of each field of a configuration what it cannot be; others are not read."""
    wrong = []
    for name, hint in typing.get_type_hints(KVTransferConfig).items():
        if name in fields:
            try:
                _check_type(name, fields[name], hint)
                _check_value(name, fields[name])
            except ConfigError as exc:
                wrong.append(exc)
    return wrong


def _check_type(name: str, value: object, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeError) as exc:  # no UTF-8 is no text
        allowed = [
            choice
            for part in (kind, *typing.get_args(kind))
            if typing.get_origin(part) is Literal
            for choice in typing.get_args(part)
        ]
        hint = f"it is one of {', '.join(allowed)}" if allowed else ""
        if isinstance(value, str) and (near := _nearest(value, allowed)):
            hint = f"did you mean {near!r}? {hint}"
        raise ConfigError(f"{name} is {value!r}: {exc}", hint=hint) from exc


def _check_value(name: str, value: Any) -> None:
    """Refuse a value of the right type that cannot be."""
    if name == "kv_buffer_size":
        try:
            value = parse_bytes(value)
        except ValueError as exc:
            raise ConfigError(f"{name}: {exc}") from exc
    if name in _RANGES and value is not None:
        _check_range(name, value, *_RANGES[name])


def _check_range(name: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        bounds = f"{least} or more" if most is None else f"{least} to {most}"
        raise ConfigError(f"{name} is {value}", hint=f"it is {bounds}")


def _wrong_names(names: Iterable[str]) -> list[ConfigError]:
    """Say of each of ``names`` that is no field which one was meant."""
    fields, wrong = KVTransferConfig.__struct_fields__, []
    for name in names:
        if name in fields:
            continue
        near = _nearest(name, fields)
        hint = f"did you mean {near!r}?" if near else f"fields: {', '.join(fields)}"
        wrong.append(
            ConfigError(
                f"{name!r} is no field of a KVTransferConfig",
                hint=f"{hint} A connector's own options go in "
                "kv_connector_extra_config",
            )
        )
    return wrong


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """Find what was meant: nearly the same letters, or the name without its prefix."""
    names = tuple(names)
    for known in names:
        if known.removeprefix("kv_") == name.lower():
            return known
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return close[0] if close else None


def check_config(config: object) -> None:
    """Refuse what is no configuration, such as a URL, or JSON that was not read yet.

    :raises TypeError: it is no :class:`KVTransferConfig`
    """
    if not isinstance(config, KVTransferConfig):
        raise TypeError(
            f"config is a KVTransferConfig, not a {type(config).__name__}: "
            f"see KVTransferConfig.from_json"
        )


def _fields_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return our fields that are set, and what is named like one; no secret."""
    found = {
        name.removeprefix(_ENV_PREFIX).lower(): text
        for name, text in environ.items()
        if name.startswith(_ENV_PREFIX)
    }
    fields = KVTransferConfig.__struct_fields__
    return {
        name: text
        for name, text in found.items()
        if name in fields or name.startswith("kv_")
    }


def _from_text(name: str, text: str) -> object:
    """Turn what an environment variable says into the field's own type."""
    kind = typing.get_type_hints(KVTransferConfig)[name]
    try:
        if name == "kv_connector_extra_config":
            return json.loads(text)
        if kind in (bool, int, int | None):
            return msgspec.convert(text, kind, strict=False)
    except (ValueError, RecursionError, msgspec.ValidationError) as exc:
        raise ConfigError(
            f"{_ENV_PREFIX}{name.upper()} is {text!r}: {exc}",
            hint="unset it, or correct it",
        ) from exc
    return text

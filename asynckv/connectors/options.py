"""What ``kv_connector_extra_config`` says to a connector, checked and explained."""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from asynckv.config import KVTransferConfig
from asynckv.errors import ConfigError
from asynckv.links.address import Address, parse_url
from asynckv.types import parse_bytes

__all__ = (
    "CONNECTOR_OPTIONS",
    "VLLM_MODES",
    "ConnectorOptions",
    "Direction",
    "config_for_vllm",
    "layout_for_vllm",
    "unknown_options",
    "url_of_rank",
    "wrong_options",
)

Direction: TypeAlias = Literal["push", "pull"]

_OF_THE_NODE: Final = frozenset(
    {
        "port_offset",
        "store_timeout",
        "local_rank",
        "peer_url",
        "fingerprint",
        "secret_file",
        "allow_plaintext",
        "max_waiting_bytes",
        "tls",
    }
)


_VLLM_LAYOUTS: Final = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "NHD", "HND")
"""Those in which a block of a layer is one run of bytes, as vLLM names them."""


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    """The options that are read as they are written."""

    listen: str | None = None
    direction: Direction = "push"
    store: str | None = None
    layerwise: bool = True
    load_timeout_s: float = 60.0
    lookup_timeout_s: float = 0.25
    fetch_timeout_s: float = 2.0
    save_timeout_s: float = 10.0
    ttl_s: float = 600.0
    consumer_tp_size: int | None = None
    consumer_pp_size: int | None = None
    chunk_tokens: int | None = None


class _Extra(_Common, frozen=True, kw_only=True):
    """The options of connectors, as they are written."""

    peers: list[str] | dict[str, str | list[str]] = {}
    mode: Literal["p2p", "store"] = "p2p"
    push_buffer_size: int | str = "256MiB"
    connectors: list[dict[str, object]] = []


VLLM_MODES: Final = {"p2p": "P2PConnector", "store": "StoreConnector"}
"""Which connector the option ``mode`` of asynckv's adapter for vLLM means."""

CONNECTOR_OPTIONS: Final = _Extra.__struct_fields__
"""The names that connectors know in ``kv_connector_extra_config``."""

_CHUNK_TOKENS: Final = 256
"""The KV of a small model's is some MiB, which is where disks and servers are fast."""


class ConnectorOptions(_Common, frozen=True, kw_only=True):
    """What every connector reads of its configuration.

    ``listen`` is where this engine serves, ``peers`` whom it may ever talk to: the
    name of each, and its URL; where only URLs are given, who answers there says its
    name. Of an engine of several ranks it is the URL of rank 0, the others are at the
    ports after it; or the URLs of all are given. ``direction``:
    ``push`` sends to the decoding engine's own buffer while the prompt is computed,
    ``pull`` keeps it here until that engine fetches it. ``consumer_tp_size`` is how
    many ranks a stage of the engine has that decodes, ``consumer_pp_size`` how many
    stages, if not as many as this one. ``lookup_timeout_s`` is how long a lookup waits
    for the first answer of a store, ``fetch_timeout_s`` how much longer for blocks that
    it has in a lower tier alone. ``push_buffer_bytes``: how much of a GPU a rank
    that pushes has for each rank that it pushes to, ``kv_buffer_size`` at the most.
    ``chunk_tokens`` is how many tokens' KV is one value of a store.
    """

    peers: dict[str, tuple[str, ...]] = {}
    push_buffer_bytes: int = 256 * 2**20
    are_peers_named: bool = True

    @classmethod
    def of(cls, config: KVTransferConfig) -> ConnectorOptions:
        """Read what ``config`` says.

        :raises ConfigError: options that are none, or cannot work; it names each
        """
        found, wrong = _read(config)
        if wrong:
            raise ConfigError.of(wrong)
        common = {name: getattr(found, name) for name in _Common.__struct_fields__}
        max_bytes = parse_bytes(found.push_buffer_size)
        return cls(
            **common,
            peers=_peers_of(found.peers),
            are_peers_named=isinstance(found.peers, dict),
            push_buffer_bytes=min(max_bytes, config.max_bytes),
        )

    def chunk_of(self, block_size: int) -> int:
        """Return how many tokens' KV is one value of a store, in blocks of this size.

        If that is not said: 256, where it is several blocks, else one block.

        :raises ConfigError: they are no whole blocks
        """
        tokens = self.chunk_tokens
        if tokens is None:
            return block_size if _CHUNK_TOKENS % block_size else _CHUNK_TOKENS
        if tokens % block_size:
            fewer = max(tokens - tokens % block_size, block_size)
            raise ConfigError(
                f"kv_connector_extra_config.chunk_tokens is {tokens}, and a block has "
                f"{block_size} tokens",
                hint=f"it is a multiple of that, as {fewer}; left out, "
                f"{ConnectorOptions().chunk_of(block_size)}",
            )
        return tokens

    def ranks_of(self, peer: str) -> int:
        """Return how many ranks ``peer`` has, of all stages; 0 if that is not said."""
        urls = self.peers.get(peer, ())
        return len(urls) if len(urls) > 1 else 0

    def url_of(self, peer: str, rank: int) -> str:
        """Return where a rank of ``peer`` serves.

        :raises KeyError: it is nobody of the configuration
        :raises ConfigError: its URL says nothing of other ranks
        """
        urls = self.peers[peer]
        if len(urls) > 1:
            if rank >= len(urls):
                raise ConfigError(f"{peer!r} has {len(urls)} URLs and no rank {rank}")
            return urls[rank]
        return url_of_rank(urls[0], rank)


def unknown_options(config: KVTransferConfig) -> list[str]:
    """Say of each option that neither connectors nor ``asynckv.open`` know."""
    known, found = {*CONNECTOR_OPTIONS, *_OF_THE_NODE}, []
    for name in config.kv_connector_extra_config:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f": did you mean {near[0]!r}?" if near else ""
            if name in KVTransferConfig.__struct_fields__:
                meant = ", but a field beside kv_connector_extra_config"
            found.append(f"kv_connector_extra_config.{name} is no option{meant}")
    return found


def wrong_options(config: KVTransferConfig) -> list[ConfigError]:
    """Say of each option that is none, or cannot work; not what is missing."""
    return _read(config)[1]


def config_for_vllm(given: KVTransferConfig) -> KVTransferConfig:
    """Return the connector's configuration that ``given`` means inside vLLM.

    vLLM fills in defaults of its own, so where KV is kept and how much of it are
    options there: ``buffer_device`` and ``max_bytes``. ``kv_cache_layout`` and
    ``layout_version`` are for vLLM's adapter alone.

    :raises ConfigError: options that cannot work; it names each
    """
    extra = dict(given.kv_connector_extra_config)
    wrong: list[ConfigError] = []
    for check in (
        _check_mode,
        layout_for_vllm,
        _check_layout_version,
        _check_max_bytes,
    ):
        try:
            check(extra)
        except ConfigError as exc:
            wrong.append(exc)
    if wrong:
        raise ConfigError.of(wrong)
    mode = str(extra.pop("mode", "p2p"))
    for name in ("layout_version", "kv_cache_layout"):
        extra.pop(name, None)
    # The peers are those that an engine may fetch from.
    extra.setdefault("direction", "pull")
    extra.setdefault("layerwise", False)
    changed: dict[str, Any] = {
        "kv_connector": VLLM_MODES[mode],
        "kv_connector_module_path": None,
        "kv_buffer_device": extra.pop("buffer_device", "cpu"),
        "kv_buffer_size": extra.pop("max_bytes", "2GiB"),
        "kv_connector_extra_config": extra,
    }
    return msgspec.structs.replace(given, **changed)


def layout_for_vllm(extra: Mapping[str, object]) -> str | None:
    """Return which layout of its caches vLLM is asked for: ``kv_cache_layout``.

    :raises ConfigError: there is none of that name, or its blocks cannot be moved
    """
    layout = extra.get("kv_cache_layout")
    if layout is not None and layout not in _VLLM_LAYOUTS:
        raise ConfigError(
            f"kv_connector_extra_config.kv_cache_layout is {layout!r}",
            hint=f"it is one of {', '.join(_VLLM_LAYOUTS)}; left out, vLLM chooses",
        )
    return layout


def url_of_rank(url: str, rank: int) -> str:
    """Return a rank's URL, given that of rank 0: as many ports, or names, further.

    :raises ConfigError: it is no URL, or there is no such port
    """
    address = parse_url(url)
    if not rank or (address.scheme in ("tcp", "tls") and not address.port):
        return url
    query = f"?payload={address.payload}" if address.payload else ""
    if address.scheme in ("tcp", "tls"):
        port = address.port + rank
        if port > 65535:
            raise ConfigError(f"{url!r} leaves no port for rank {rank}")
        host = address.name or address.host
        return str(Address(address.scheme, host=host, port=port)) + query
    return str(Address(address.scheme, place=f"{address.place}.{rank}")) + query


def _check_mode(extra: Mapping[str, object]) -> None:
    mode = extra.get("mode", "p2p")
    if not isinstance(mode, str) or mode not in VLLM_MODES:
        raise ConfigError(
            f"kv_connector_extra_config.mode is {mode!r}",
            hint=f"it is one of {', '.join(VLLM_MODES)}",
        )


def _check_max_bytes(extra: Mapping[str, Any]) -> None:
    try:
        parse_bytes(extra.get("max_bytes", 1))
    except ValueError as exc:
        raise ConfigError(f"kv_connector_extra_config.max_bytes: {exc}") from exc


def _check_layout_version(extra: Mapping[str, object]) -> None:
    given = extra.get("layout_version")
    if given is None or (isinstance(given, str) and given.strip()):
        return
    raise ConfigError(
        f"kv_connector_extra_config.layout_version is {given!r}",
        hint='a text, like "1", that engines have in common whose blocks mean the same',
    )


def _read(config: KVTransferConfig) -> tuple[_Extra, list[ConfigError]]:
    """Return the options that can work, and what is wrong with each of the others."""
    extra = config.kv_connector_extra_config
    wrong = [ConfigError(each) for each in unknown_options(config)]
    if wrong:
        options = ", ".join(sorted({*CONNECTOR_OPTIONS, *_OF_THE_NODE}))
        wrong[-1] = ConfigError(wrong[-1].message, hint=f"options: {options}")
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(_Extra).items():
        if name in extra:
            try:
                found[name] = msgspec.convert(extra[name], kind)
                _check_option(name, found[name])
            except ConfigError as exc:
                wrong.append(exc)
            except (msgspec.ValidationError, UnicodeError) as exc:
                wrong.append(ConfigError(f"kv_connector_extra_config.{name}: {exc}"))
    return _Extra() if wrong else _Extra(**found), wrong


def _check_option(name: str, value: Any) -> None:
    """Refuse a value of the right type that cannot be."""
    where = f"kv_connector_extra_config.{name}"
    if name in ("listen", "store") and value is not None:
        _check_url(where, value)
    elif name == "peers":
        for peer, urls in _peers_of(value).items():
            if not urls:
                raise ConfigError(f"{where}: {peer!r} has no URL")
            for url in urls:
                _check_url(where, url)
    elif name.endswith("_s") and not 0 < value < math.inf:
        hint = "it is a finite number of seconds, more than 0"
        raise ConfigError(f"{where} is {value:g}", hint=hint)
    elif name in ("consumer_tp_size", "consumer_pp_size", "chunk_tokens"):
        if value is not None and value < 1:
            hint = "it is 1 or more; leave it out for what it is by itself"
            raise ConfigError(f"{where} is less than 1", hint=hint)
    elif name == "push_buffer_size":
        try:
            parse_bytes(value)
        except ValueError as exc:
            raise ConfigError(f"{where}: {exc}") from exc


def _check_url(where: str, url: str) -> None:
    try:
        parse_url(url)
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc.message}", hint=exc.hint) from exc


def _peers_of(
    peers: list[str] | dict[str, str | list[str]],
) -> dict[str, tuple[str, ...]]:
    named = {url: url for url in peers} if isinstance(peers, list) else peers
    return {
        name: (urls,) if isinstance(urls, str) else tuple(urls)
        for name, urls in named.items()
    }

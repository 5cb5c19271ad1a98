"""What people write: URLs, configurations, sizes. Wrong ones are told as such."""

from __future__ import annotations

import json
import random
from typing import Any, Final

from asynckv.config import KVTransferConfig
from asynckv.errors import ConfigError
from asynckv.links.address import parse_url
from asynckv.types import parse_bytes
from harness.fuzzing.corpus import Corpus, Target, expect
from harness.fuzzing.mutations import change_bytes

__all__ = ("CONFIG", "SIZES", "URLS")

_URLS: Final = (
    "tcp://127.0.0.1:7000",
    "tcp://[::1]:0?payload=inline",
    "tcp://localhost:65535",
    "unix:///run/asynckv.sock",
    "unix:///a%20b?payload=map",
    "mem://name/with/path",
    "mem://",
    "tls://host:1",
    "",
)
_BITS: Final = (
    "[", "]", "@", "#", "?", "/", "%00", "%", ":", "::", "é", "\0", "\n", "\udcff",
    "payload=", "&", "70000", "-1", "٣", "x" * 120, " ", "\\", "ﬀ", "℀",
)  # fmt: skip
_SIZES: Final = ("1GiB", "2 GB", "1e9", "64MiB", "0", "1.5k", "9" * 400, "1e999", "")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _changed(text: str, rng: random.Random) -> bytes:
    for _ in range(rng.choice((0, 1, 1, 2))):
        start = rng.randrange(len(text) + 1)
        text = text[:start] + rng.choice(_BITS) + text[start + rng.randrange(3) :]
    data = text.encode("utf-8", "surrogateescape")
    return change_bytes(data, rng) if rng.random() < 0.3 else data


def _make_url(rng: random.Random, corpus: Corpus) -> bytes:
    return _changed(rng.choice(_URLS), rng)


def _check_url(data: bytes) -> None:
    """A URL says where, and says it again; or it is a ``ConfigError``."""
    try:
        address = parse_url(_text(data))
    except ConfigError:
        return
    expect(0 <= address.port <= 65535, "an impossible port", address)
    again = parse_url(str(address))
    same = (again.scheme, again.host, again.port, again.place)
    expect(
        same == (address.scheme, address.host, address.port, address.place),
        "reads back as another address",
        address,
        again,
    )


_CONFIGS: Final[tuple[dict[str, Any], ...]] = (
    {"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer", "kv_rank": 0},
    {"kv_role": "kv_both", "kv_buffer_size": "1e9", "kv_ip": "::1", "kv_port": 1},
    {
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {
            "port_offset": 3,
            "store_timeout": 1.5,
            "peer_url": "tcp://h:1",
            "fingerprint": {"model": "m"},
        },
    },
)
_VALUES: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1, 70000, 10**30, 1.5, 1e400, float("nan"), "", "1e9", "x",
    "kv_both", [], [1], {}, {"port_offset": "x"}, {"store_timeout": -1},
    {"fingerprint": [1]}, {"fingerprint": {"nope": "x"}}, {"port_offset": 10**30},
)  # fmt: skip


def _make_config(rng: random.Random, corpus: Corpus) -> bytes:
    fields = dict(rng.choice(_CONFIGS))
    for _ in range(rng.choice((0, 1, 1, 2))):
        names = (*KVTransferConfig.__struct_fields__, "kv_rol", "x")
        fields[rng.choice(names)] = rng.choice(_VALUES)
    data = json.dumps(fields).encode()
    return change_bytes(data, rng) if rng.random() < 0.4 else data


def _check_config(data: bytes) -> None:
    """A configuration can be used as it stands, or it is a ``ConfigError``."""
    try:
        config = KVTransferConfig.from_json(_text(data))
    except ConfigError:
        return
    expect(config.max_bytes >= 1, "no room at all", config)
    for name in ("url", "store_timeout_s", "peer_url", "fingerprint"):
        try:
            getattr(config, name)
        except ConfigError:
            continue


def _make_size(rng: random.Random, corpus: Corpus) -> bytes:
    return _changed(rng.choice(_SIZES), rng)


def _check_size(data: bytes) -> None:
    """A size is a number of bytes, or a ``ValueError``."""
    try:
        nbytes = parse_bytes(_text(data))
    except ValueError:
        return
    expect(isinstance(nbytes, int) and nbytes >= 0, "no number of bytes", nbytes)


URLS: Final = Target("urls", _make_url, _check_url)
CONFIG: Final = Target("config", _make_config, _check_config)
SIZES: Final = Target("sizes", _make_size, _check_size)

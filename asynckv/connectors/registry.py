"""Which connectors there are, by the name that a configuration has for them."""

from __future__ import annotations

import difflib
import importlib
import logging
import types
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from asynckv.abc import KVConnectorScheduler, KVConnectorWorker
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.multi import MultiScheduler, MultiWorker
from asynckv.connectors.p2p.scheduler import P2PScheduler
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.connectors.store.worker import StoreWorker
from asynckv.errors import ConfigError

__all__ = (
    "CONNECTORS",
    "DEFAULT_CONNECTOR",
    "KVConnectorKind",
    "MultiConnector",
    "P2PConnector",
    "StoreConnector",
    "children_of",
    "find_connector",
    "get_kv_connector_cache_layout",
    "make_scheduler",
    "make_worker",
)

logger = logging.getLogger(__name__)

DEFAULT_CONNECTOR: Final = "P2PConnector"
_DEFAULT_LAYOUT: Final = "NHD"


class KVConnectorKind(msgspec.Struct, frozen=True):
    """Both sides of a connector. One of your own is a value like this in a module.

    ``scheduler_type`` is asked which layout the caches must have.
    """

    name: str
    scheduler_type: type[KVConnectorScheduler]
    make_scheduler: Callable[[KVTransferConfig, KVEngine], KVConnectorScheduler]
    make_worker: Callable[[KVTransferConfig, KVEngine], KVConnectorWorker]


def _multi_scheduler(config: KVTransferConfig, engine: KVEngine) -> MultiScheduler:
    return MultiScheduler([make_scheduler(one, engine) for one in children_of(config)])


def _multi_worker(config: KVTransferConfig, engine: KVEngine) -> MultiWorker:
    # Its children are waited for together: none longer than a step can bear.
    engine = msgspec.structs.replace(engine, holds_saved_blocks=False)
    return MultiWorker([make_worker(one, engine) for one in children_of(config)])


P2PConnector: Final = KVConnectorKind(
    "P2PConnector", P2PScheduler, P2PScheduler, P2PWorker
)
"""Prefill here, decode there: straight from one engine to the other."""

StoreConnector: Final = KVConnectorKind(
    "StoreConnector", StoreScheduler, StoreScheduler, StoreWorker
)
"""Prompts in blocks, in a store that any number of engines share."""

MultiConnector: Final = KVConnectorKind(
    "MultiConnector", MultiScheduler, _multi_scheduler, _multi_worker
)
"""Several of them: ``kv_connector_extra_config.connectors`` says which."""

CONNECTORS: Final[Mapping[str, KVConnectorKind]] = types.MappingProxyType(
    {kind.name: kind for kind in (P2PConnector, StoreConnector, MultiConnector)}
)
"""Those that come with asynckv."""


_OF_VLLM: Final = {
    **dict.fromkeys(
        (
            "HiSparseConnector",
            "MoRIIOConnector",
            "MooncakeConnector",
            "NixlConnector",
            "NixlPullConnector",
            "NixlPushConnector",
            "P2pNcclConnector",
            "PyNcclConnector",
        ),
        "P2PConnector",
    ),
    **dict.fromkeys(
        (
            "ExampleConnector",
            "FlexKVConnectorV1",
            "HF3FSKVConnector",
            "LMCacheConnector",
            "LMCacheConnectorV1",
            "LMCacheMPConnector",
            "MooncakeStoreConnector",
            "OffloadingConnector",
            "SharedStorageConnector",
            "SimpleCPUOffloadConnector",
        ),
        "StoreConnector",
    ),
}
"""vLLM's own connectors, now and before, and ours for the same work."""


def find_connector(config: KVTransferConfig) -> KVConnectorKind:
    """Return the connector of a configuration; without a name, ``P2PConnector``.

    With ``kv_connector_module_path`` it is that module's value of that name.

    :raises ConfigError: there is none of that name
    """
    name = config.kv_connector or DEFAULT_CONNECTOR
    if config.kv_connector_module_path is None:
        kind = CONNECTORS.get(name)
        if kind is None:
            if ours := _OF_VLLM.get(name):
                raise ConfigError(
                    f"{name} is vLLM's own connector; asynckv's is {ours}",
                    hint="inside vLLM it is AsyncKVConnector, of the module "
                    "asynckv.integrations.vllm",
                )
            near = difflib.get_close_matches(name, CONNECTORS, n=1)
            known = f"connectors: {', '.join(CONNECTORS)}; or name its module"
            raise ConfigError(
                f"there is no connector {name!r}",
                hint=f"did you mean {near[0]!r}?" if near else known,
            )
        return kind
    path = config.kv_connector_module_path
    try:
        found = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(
            f"kv_connector_module_path {path!r} has no {name!r}: {exc}"
        ) from exc
    if not isinstance(found, KVConnectorKind):
        raise ConfigError(f"{path}.{name} is no KVConnectorKind")
    return found


def make_scheduler(config: KVTransferConfig, engine: KVEngine) -> KVConnectorScheduler:
    """Return the scheduler side of the configured connector.

    :raises ConfigError: a configuration that cannot work
    """
    return find_connector(config).make_scheduler(config, engine)


def make_worker(config: KVTransferConfig, engine: KVEngine) -> KVConnectorWorker:
    """Return the worker side of the configured connector, for ``engine.rank``.

    :raises ConfigError: a configuration that cannot work
    """
    return find_connector(config).make_worker(config, engine)


def children_of(config: KVTransferConfig) -> tuple[KVTransferConfig, ...]:
    """Return the configurations of a MultiConnector's connectors, in order.

    Each is written like a whole one; what it does not say is as in ``config``.

    :raises ConfigError: there is none, or one that cannot work, or two that go from
        peer to peer: a request's parameters could not say which of them they are for
    """
    extra = dict(config.kv_connector_extra_config)
    given = extra.pop("connectors", [])
    if not isinstance(given, list) or not given:
        raise ConfigError(
            "a MultiConnector needs kv_connector_extra_config.connectors",
            hint='[{"kv_connector": "P2PConnector", ...}, ...]',
        )
    fields = msgspec.structs.asdict(config)
    children = []
    for one in given:
        if not isinstance(one, dict) or one.keys() - fields.keys():
            raise ConfigError(f"connectors: {one!r} is no configuration")
        own_extra = one.get("kv_connector_extra_config", {})
        merged = {**fields, "kv_connector_module_path": None, **one}
        merged["kv_connector_extra_config"] = {**extra, **own_extra}
        children.append(KVTransferConfig(**merged))
    if sum(map(_count_p2p, children)) > 1:
        raise ConfigError(
            "a MultiConnector can have one P2PConnector, and here are several",
            hint='one is enough for any number of "peers": name them all there',
        )
    return tuple(children)


def _count_p2p(config: KVTransferConfig) -> int:
    """Return how many connectors from peer to peer there are in a configuration."""
    try:
        kind = find_connector(config)
        if kind.name == MultiConnector.name:
            return sum(map(_count_p2p, children_of(config)))
    except ConfigError:
        return 0  # who makes that connector, or explains it, says what is wrong
    return issubclass(kind.scheduler_type, P2PScheduler)


def get_kv_connector_cache_layout(config: KVTransferConfig) -> str:
    """Return the layout that the configured connector requires, else ``"NHD"``.

    :raises ConfigError: there is no such connector
    """
    layout = find_connector(config).scheduler_type.get_required_kvcache_layout()
    if layout is None:
        logger.info("the connector requires no cache layout: %s", _DEFAULT_LAYOUT)
        return _DEFAULT_LAYOUT
    return layout

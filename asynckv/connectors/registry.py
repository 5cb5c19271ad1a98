"""Which connectors there are, by the name that a configuration has for them.

And what a configuration means, line by line, and what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import logging
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from asynckv.abc import KVConnectorScheduler, KVConnectorWorker
from asynckv.config import KVTransferConfig, check_config
from asynckv.connectors.connections import FINGERPRINT_HINT
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.multi import MultiScheduler, MultiWorker
from asynckv.connectors.options import (
    CONNECTOR_OPTIONS,
    ConnectorOptions,
    config_for_vllm,
    unknown_options,
    wrong_options,
)
from asynckv.connectors.p2p.scheduler import P2PScheduler
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.connectors.store.worker import StoreWorker
from asynckv.errors import ConfigError
from asynckv.links.address import check_exposure, parse_url
from asynckv.links.options import make_keyring

__all__ = (
    "CONNECTORS",
    "DEFAULT_CONNECTOR",
    "Explained",
    "KVConnectorKind",
    "MultiConnector",
    "P2PConnector",
    "StoreConnector",
    "children_of",
    "explain",
    "explain_options",
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
    check_config(config)
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
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
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
    children = _children_in(config)
    if sum(map(_count_p2p, children)) > 1:
        raise ConfigError(
            "a MultiConnector can have one P2PConnector, and here are several",
            hint='one is enough for any number of "peers": name them all there',
        )
    return children


def _children_in(config: KVTransferConfig) -> tuple[KVTransferConfig, ...]:
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
        merged = {**fields, "kv_connector_module_path": None, **one}
        own = one.get("kv_connector_extra_config", {})
        if isinstance(own, dict):  # of others the configuration says what they are
            merged["kv_connector_extra_config"] = {**extra, **own}
        children.append(KVTransferConfig(**merged))
    return tuple(children)


def _count_p2p(config: KVTransferConfig) -> int:
    """Return how many connectors from peer to peer there are in a configuration."""
    try:
        kind = find_connector(config)
        if kind == MultiConnector:
            return sum(map(_count_p2p, _children_in(config)))
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


_NO_ROLE: Final = (
    'kv_role is not set (write "kv_producer", "kv_consumer", or "kv_both" to be both)'
)
_NO_STORE: Final = (
    'store is not set (write "kv_connector_extra_config": '
    '{"store": "tcp://HOST:PORT"}, the URL that asynckv serve prints)'
)
_INSIDE_VLLM: Final = "AsyncKVConnector"
_OF_THE_ADAPTER: Final = (
    "mode",
    "buffer_device",
    "max_bytes",
    "kv_cache_layout",
    "layout_version",
)
"""The options that connectors know by no name, or by another one."""


@dataclasses.dataclass(frozen=True)
class Explained:
    """``facts`` say what will happen, ``problems`` what cannot work, with a hint."""

    facts: tuple[str, ...]
    problems: tuple[str, ...]


def explain(config: KVTransferConfig) -> Explained:
    """Say what ``config`` makes a connector, or ``asynckv.open``, do.

    It is a connector's if it names one or has an option of one. Opens nothing, asks
    nobody.
    """
    if config.kv_connector is None and not _has_options(config):
        return _explain_node(config)
    if config.kv_connector == _INSIDE_VLLM:
        return _explain_vllm(config)
    return _explain_connector(config)


def explain_options(fields: Mapping[str, object]) -> tuple[str, ...]:
    """Say what is wrong with the connector, device and options among ``fields``.

    It is for fields that make no configuration: these three are read whatever the
    others are. What is missing is not said.
    """
    connector = fields.get("kv_connector")
    device = fields.get("kv_buffer_device")
    extra = fields.get("kv_connector_extra_config")
    path = fields.get("kv_connector_module_path")
    config = KVTransferConfig(
        kv_connector=connector if isinstance(connector, str) else None,
        kv_role="kv_both",
        kv_buffer_device=device if isinstance(device, str) else "cpu",
        kv_connector_extra_config=extra if isinstance(extra, dict) else {},
        kv_connector_module_path=path if isinstance(path, str) else None,
    )
    problems = _wrong_options(config)
    if config.kv_connector != _INSIDE_VLLM and path is None:
        try:
            find_connector(config)
        except ConfigError as exc:
            problems += exc.problems
    return tuple(problems)


def _wrong_options(config: KVTransferConfig) -> list[str]:
    problems: list[str] = []
    if config.kv_connector == _INSIDE_VLLM:
        rest = dict(config.kv_connector_extra_config)
        own = {name: rest.pop(name) for name in _OF_THE_ADAPTER if name in rest}
        for name in own:
            try:
                config_for_vllm(_with_options(config, {name: own[name]}))
            except ConfigError as exc:
                problems += exc.problems
            else:
                rest[name] = own[name]
        config = config_for_vllm(_with_options(config, rest))
    problems += _of_the_node(config)
    is_ours = config.kv_connector_module_path is None
    if is_ours and (config.kv_connector is not None or _has_options(config)):
        problems += [str(wrong) for wrong in wrong_options(config)]
    return list(dict.fromkeys(problems))


def _with_options(
    config: KVTransferConfig, options: dict[str, object]
) -> KVTransferConfig:
    return msgspec.structs.replace(config, kv_connector_extra_config=options)


def _has_options(config: KVTransferConfig) -> bool:
    return not config.kv_connector_extra_config.keys().isdisjoint(CONNECTOR_OPTIONS)


def _explain_node(config: KVTransferConfig) -> Explained:
    """Say what ``asynckv.open`` does; and, as a fact, what a connector would lack."""
    facts, problems = [_role_of(config)], _of_the_node(config)
    facts += [f"ignored: {each}" for each in unknown_options(config)]
    try:
        if config.kv_role is None:
            problems.append(_NO_ROLE)
        if config.is_kv_producer:
            facts.append(
                f"asynckv.open serves at {config.url}, at most {config.max_bytes} "
                "bytes (kv_buffer_size)"
            )
            problems += _exposed(config, [config.url])
        if config.is_kv_consumer:
            if config.peer_url is None:
                raise ConfigError(
                    "a kv_both also selects, and has nobody to ask",
                    hint='write "kv_connector_extra_config": {"peer_url": '
                    '"tcp://HOST:PORT"}',
                )
            facts.append(f"asynckv.open connects to {config.peer_url}")
            problems += _exposed(config, [config.peer_url])
    except ConfigError as exc:
        problems += exc.problems
    if not problems:
        connector = _explain_connector(config)
        facts += [
            f"as a {DEFAULT_CONNECTOR}, which an engine calls, it would lack: {each}"
            for each in connector.problems
        ]
    return Explained(tuple(facts), tuple(dict.fromkeys(problems)))


def _explain_vllm(config: KVTransferConfig) -> Explained:
    try:
        inside = config_for_vllm(config)
        if inside.fingerprint is None:  # vLLM's own words for the model
            extra = {**inside.kv_connector_extra_config, "fingerprint": "the engine's"}
            inside = _with_options(inside, extra)
    except ConfigError:
        return Explained((_role_of(config),), tuple(_wrong_options(config)))
    explained = _explain_connector(inside)
    facts = ("inside vLLM, by asynckv's adapter", *explained.facts)
    return Explained(facts, explained.problems)


def _explain_connector(config: KVTransferConfig) -> Explained:
    facts, problems = [_role_of(config)], list[str]()
    try:
        kind = find_connector(config)
    except ConfigError as exc:
        problems += [*exc.problems, *_wrong_options(config)]
        return Explained(tuple(facts), tuple(problems))
    try:
        if kind == MultiConnector:
            children = children_of(config)
            facts.append(f"uses {len(children)} connectors, in this order:")
            for number, child in enumerate(children, 1):
                one = explain(child)
                facts += [f"  {number}: {fact}" for fact in one.facts]
                problems += [f"connector {number}: {each}" for each in one.problems]
            return Explained(tuple(facts), tuple(problems))
        problems += _of_the_node(config)
        if kind not in CONNECTORS.values():
            facts.append(f"connector: {kind.name}, not asynckv's: it reads its options")
            return Explained(tuple(facts), tuple(dict.fromkeys(problems)))
        options = ConnectorOptions.of(config)
        facts.append(f"connector: {kind.name}")
        if kind.name == "StoreConnector":
            problems += _store(config, options, facts)
        else:
            problems += _p2p(config, options, facts)
        of_peers = [url for urls in options.peers.values() for url in urls]
        problems += _exposed(config, [options.store, options.listen, *of_peers])
        facts.append(
            "a load that fails is computed here instead"
            if config.kv_load_failure_policy == "recompute"
            else "a load that fails makes its request fail (kv_load_failure_policy)"
        )
        if config.kv_buffer_device.startswith("cuda"):
            facts.append(
                f"caches must be on {config.kv_buffer_device} (kv_buffer_device); "
                + _on_the_gpu(config, kind.name, options.direction)
            )
    except ConfigError as exc:
        problems += exc.problems
    if config.kv_role is None:
        problems.append(_NO_ROLE)
    return Explained(tuple(facts), tuple(dict.fromkeys(problems)))


def _role_of(config: KVTransferConfig) -> str:
    what = {
        "kv_producer": "prefills for others",
        "kv_consumer": "decodes what others prefilled",
        "kv_both": "prefills for others, and decodes what others prefilled",
    }
    role = config.kv_role
    return "no role" if role is None else f"{role}: {what[role]}"


def _of_the_node(config: KVTransferConfig) -> list[str]:
    """Say what is wrong with options that are read when something is opened."""
    problems: list[str] = []
    for read in (
        config.check_device,
        lambda: config.max_waiting_bytes,
        lambda: config.store_timeout_s,
        lambda: config.local_rank,
        lambda: config.fingerprint,
        lambda: config.secret_file,
        lambda: config.allow_plaintext,
        lambda: config.tls,
        lambda: config.url,
        lambda: config.peer_url,
    ):
        try:
            read()
        except ConfigError as exc:
            problems += exc.problems
    return problems


def _p2p(
    config: KVTransferConfig, options: ConnectorOptions, facts: list[str]
) -> list[str]:
    """Add to ``facts``, and return the problems."""
    problems = []
    is_push = options.direction == "push"
    serves = config.is_kv_consumer if is_push else config.is_kv_producer
    dials = config.is_kv_producer if is_push else config.is_kv_consumer
    facts.append(
        "push: prompts are sent to the decoding engine while they are computed"
        if is_push
        else "pull: prompts are kept until the decoding engine fetches them"
    )
    if serves:
        facts.append(
            f"serves at {options.listen or config.url}, further ranks after it"
        )
        facts.append(f"keeps at most {config.max_bytes} bytes (kv_buffer_size) a rank")
        if options.listen and parse_url(options.listen).scheme in ("tcp", "tls"):
            port = parse_url(options.listen).port
            if not port:
                problems.append("listen has port 0: peers could not be told it")
    if dials and not options.peers:
        verb = "push to" if is_push else "fetch from"
        pull = ', or "direction": "pull" to keep prompts here' if is_push else ""
        problems.append(
            f"peers is empty: there is nobody to {verb} (write "
            f'"kv_connector_extra_config": {{"peers": ["tcp://HOST:PORT"]}}{pull})'
        )
    for name, urls in options.peers.items():
        shown = "" if urls == (name,) else f"{name}: "
        facts.append(f"may talk to {shown}{', '.join(urls)}")
    facts.append("talks to nobody else, whatever a request says")
    return problems


def _store(
    config: KVTransferConfig, options: ConnectorOptions, facts: list[str]
) -> list[str]:
    """Add to ``facts``, and return the problems."""
    if options.store is None:
        return [_NO_STORE]
    saves, loads = config.is_kv_producer, config.is_kv_consumer
    verbs = ["saves to"] * saves + ["loads from"] * loads
    facts.append(f"{' and '.join(verbs) or 'knows'} the store at {options.store}")
    if config.fingerprint is None:
        return [f"fingerprint is not set: {FINGERPRINT_HINT}"]
    return []


def _on_the_gpu(config: KVTransferConfig, kind: str, direction: str) -> str:
    """Say what has memory of the GPU of the caches, beside them."""
    if kind == "StoreConnector":
        return "what is saved and loaded goes through host memory"
    produces, consumes = config.is_kv_producer, config.is_kv_consumer
    if direction == "push":
        held = ["what waits here"] * consumes + ["what is pushed"] * produces
    else:
        held = ["what waits here"] * produces + ["what is fetched"] * consumes
    return f"{' and '.join(held)} has that GPU's memory"


def _exposed(config: KVTransferConfig, urls: Iterable[str | None]) -> list[str]:
    keyring = make_keyring(config.secret_file, config.tls, config.allow_plaintext)
    problems: list[str] = []
    for url in urls:
        if url is None:
            continue
        try:
            check_exposure(parse_url(url), keyring)
        except ConfigError as exc:
            problems += exc.problems
    return problems

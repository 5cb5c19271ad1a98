from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from asynckv.abc import KVConnectorScheduler
from asynckv.config import KVTransferConfig
from asynckv.connectors import registry
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.multi import MultiWorker
from asynckv.connectors.p2p.scheduler import P2PScheduler
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.registry import (
    KVConnectorKind,
    children_of,
    find_connector,
    get_kv_connector_cache_layout,
    make_scheduler,
    make_worker,
)
from asynckv.errors import ConfigError

ENGINE = KVEngine(engine_id="E", block_size=4)


class _NeedsHND(P2PScheduler):
    @classmethod
    def get_required_kvcache_layout(cls) -> str | None:
        return "HND"


Mine = KVConnectorKind("Mine", _NeedsHND, _NeedsHND, P2PWorker)
Abstract = KVConnectorKind(
    "Abstract",
    KVConnectorScheduler,  # type: ignore[type-abstract]
    _NeedsHND,
    P2PWorker,
)


def config_of(name: str | None = None, module: str | None = None) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_module_path=module
    )


def test_both_sides_of_the_configured_connector_are_made() -> None:
    assert isinstance(make_scheduler(config_of(), ENGINE), P2PScheduler)
    assert isinstance(make_worker(config_of("P2PConnector"), ENGINE), P2PWorker)


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("P2PConector", None, "did you mean 'P2PConnector'"),
        ("x", None, "connectors: "),
        ("x", "no.such.module", "has no 'x'"),
        ("P2PWorker", "asynckv.connectors.p2p.worker", "is no KVConnectorKind"),
    ],
)
def test_a_connector_that_is_not_there_is_named(
    name: str, module: str | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        find_connector(config_of(name, module))


def test_the_layout_is_what_the_connector_requires_or_nhd(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, registry.__name__):
        assert get_kv_connector_cache_layout(config_of()) == "NHD"
    assert len(caplog.records) == 1
    kinds = {"Mine": Mine, "Abstract": Abstract}
    monkeypatch.setattr(registry, "CONNECTORS", kinds)
    assert get_kv_connector_cache_layout(config_of("Mine")) == "HND"
    with pytest.raises(TypeError):
        get_kv_connector_cache_layout(config_of("Abstract"))


def test_the_connectors_of_a_multi_connector_inherit_what_they_do_not_say() -> None:
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_port=77,
        kv_connector_extra_config={
            "secret_file": "s",
            "connectors": [{"kv_connector": "StoreConnector", "kv_port": 78}, {}],
        },
    )
    one, two = children_of(config)
    assert (one.kv_connector, one.kv_port, one.secret_file) == (
        "StoreConnector",
        78,
        "s",
    )
    assert two.kv_port == 77


@pytest.mark.parametrize("given", [[], None, [3], [{"no_such_field": 1}]])
def test_a_multi_connector_of_nothing_is_refused(given: object) -> None:
    extra = {} if given is None else {"connectors": given}
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    with pytest.raises(ConfigError):
        children_of(config)


P2P = {"kv_connector": "P2PConnector"}
STORE = {"kv_connector": "StoreConnector"}


def several(*connectors: object) -> dict[str, object]:
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.mark.parametrize("connectors", [(P2P, P2P), (several(STORE, P2P), P2P)])
@pytest.mark.parametrize("make", [make_scheduler, make_worker])
def test_two_connectors_from_peer_to_peer_are_refused(
    connectors: tuple[object, ...], make: Callable[..., object]
) -> None:
    config = KVTransferConfig(kv_role="kv_both", **several(*connectors))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="can have one P2PConnector") as caught:
        make(config, ENGINE)
    assert "peers" in caught.value.hint


def test_of_several_connectors_none_keeps_a_step_waiting_for_its_blocks() -> None:
    extra: dict[str, object] = {"connectors": [{"kv_connector": "P2PConnector"}]}
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    engine = KVEngine(engine_id="E", block_size=4, holds_saved_blocks=True)
    worker = make_worker(config, engine)
    assert isinstance(worker, MultiWorker)
    (child,) = worker.children
    assert isinstance(child, P2PWorker) and not child.engine.holds_saved_blocks
    worker.abort()

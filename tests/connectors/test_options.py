"""What a configuration says of connectors, and which they are."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from asynckv.abc import KVConnectorScheduler
from asynckv.config import KVTransferConfig
from asynckv.connectors import registry
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.multi import MultiWorker
from asynckv.connectors.options import (
    ConnectorOptions,
    config_for_vllm,
    layout_for_vllm,
    url_of_rank,
)
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


def options_of(**extra: object) -> ConnectorOptions:
    config = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra)
    return ConnectorOptions.of(config)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"peer": ["tcp://h:1"]}, "did you mean"),
        ({"peers": ["nonsense"]}, "not a URL"),
        ({"peers": {"P": []}}, "has no URL"),
        ({"direction": "sideways"}, "direction"),
        ({"load_timeout_s": 0}, "load_timeout_s is 0"),
        ({"consumer_tp_size": 0}, "consumer_tp_size"),
        ({"push_buffer_size": "much"}, "push_buffer_size"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    extra: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        options_of(**extra)


def test_push_is_what_happens_unless_somebody_says_pull() -> None:
    assert options_of().direction == "push"
    assert options_of(direction="pull").direction == "pull"


@pytest.mark.parametrize(("asked", "nbytes"), [("2MiB", 2**21), ("1TiB", 10**9)])
def test_what_pushes_has_as_much_of_a_gpu_as_is_kept_at_the_most(
    asked: str, nbytes: int
) -> None:
    assert options_of(push_buffer_size=asked).push_buffer_bytes == nbytes


@pytest.mark.parametrize(
    ("block_size", "chunk_tokens", "tokens"),
    [
        *((16, None, 256), (32, None, 256), (1, None, 256), (128, None, 256)),
        *((256, None, 256), (512, None, 512), (48, None, 48), (1056, None, 1056)),
        *((16, 16, 16), (16, 512, 512), (48, 96, 96)),
    ],
)
def test_a_value_of_a_store_is_256_tokens_where_these_are_several_blocks(
    block_size: int, chunk_tokens: int | None, tokens: int
) -> None:
    assert options_of(chunk_tokens=chunk_tokens).chunk_of(block_size) == tokens


@pytest.mark.parametrize(
    ("asked", "block_size", "hint"),
    [(100, 16, "as 96; left out, 256"), (8, 16, "as 16;"), (256, 48, "as 240;")],
)
def test_a_value_is_of_whole_blocks(asked: int, block_size: int, hint: str) -> None:
    config = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "store": "mem://s",
            "fingerprint": "toy",
            "chunk_tokens": asked,
        },
    )
    for make in (make_scheduler, make_worker):
        with pytest.raises(ConfigError, match=f"chunk_tokens is {asked}") as caught:
            make(config, KVEngine(engine_id="E", block_size=block_size))
        assert hint in caught.value.hint


@pytest.mark.parametrize("asked", [0, -16, 16.5, "16", True, []])
def test_a_value_has_a_whole_number_of_tokens(asked: object) -> None:
    with pytest.raises(ConfigError, match="chunk_tokens"):
        options_of(chunk_tokens=asked)


def test_peers_have_names_or_are_their_urls() -> None:
    named = options_of(peers={"P": "tcp://h:1", "Q": ["tcp://h:2", "tcp://i:2"]})
    assert named.url_of("Q", 1) == "tcp://i:2"
    assert named.url_of("P", 2) == "tcp://h:3"
    assert named.are_peers_named
    assert not options_of(peers=["tcp://h:1"]).are_peers_named
    with pytest.raises(KeyError):
        named.url_of("tcp://elsewhere:1", 0)


@pytest.mark.parametrize(
    ("url", "second"),
    [
        ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"),
        ("tcp://127.0.0.1:7000?payload=inline", "tcp://127.0.0.1:7001?payload=inline"),
        ("tls://kv.example:7000", "tls://kv.example:7001"),
        ("unix:///run/a.sock", "unix:///run/a.sock.1"),
        ("mem://a", "mem://a.1"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
    ],
)
def test_each_rank_is_a_port_or_a_name_further(url: str, second: str) -> None:
    assert url_of_rank(url, 0) == url
    assert url_of_rank(url, 1) == second
    with pytest.raises(ConfigError, match="no port"):
        url_of_rank("tcp://h:65535", 1)


def for_vllm(**extra: object) -> KVTransferConfig:
    return config_for_vllm(
        KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra)
    )


def test_inside_vllm_kv_is_pulled_when_a_prompt_is_computed() -> None:
    options = ConnectorOptions.of(for_vllm())
    assert (options.direction, options.layerwise) == ("pull", False)
    options = ConnectorOptions.of(for_vllm(direction="push", layerwise=True))
    assert (options.direction, options.layerwise) == ("push", True)


def test_inside_vllm_an_option_says_which_connector_it_is() -> None:
    assert for_vllm().kv_connector == "P2PConnector"
    assert for_vllm(mode="store").kv_connector == "StoreConnector"
    assert "mode" not in for_vllm(mode="p2p").kv_connector_extra_config
    for mode in ("pipe", 7):
        with pytest.raises(ConfigError, match="mode is"):
            for_vllm(mode=mode)


def test_inside_vllm_where_and_how_much_is_kept_are_options() -> None:
    config = for_vllm(max_bytes="1MiB", buffer_device="cuda")
    assert (config.max_bytes, config.kv_buffer_device) == (2**20, "cuda")
    assert (for_vllm().max_bytes, for_vllm().kv_buffer_device) == (2**31, "cpu")


@pytest.mark.parametrize("name", ["consumer_tp_size", "consumer_pp_size"])
def test_the_engine_that_decodes_may_have_one_rank(name: str) -> None:
    assert getattr(options_of(**{name: 1}), name) == 1


def options_on_the_page_on_vllm() -> set[str]:
    """Those of its table, and those that it says are of no use there."""
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    section = page.split("\n## Options\n")[1].split("\n## ")[0]
    table, useless = section.split("of no use inside vLLM:")
    cells = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    named = [*cells, useless.split("\n\n")[0]]
    return set(re.findall(r"`([a-z_]+)`", " ".join(named)))


def is_option_inside_vllm(name: str) -> bool:
    try:
        ConnectorOptions.of(for_vllm(**{name: 1}))
    except ConfigError as exc:
        return f"{name} is no option" not in str(exc)
    return True


def test_every_option_in_the_page_on_vllm_is_one() -> None:
    named = options_on_the_page_on_vllm()
    assert {name for name in named if not is_option_inside_vllm(name)} == set()
    assert not is_option_inside_vllm("no_such_option")


def test_every_option_is_in_the_page_on_vllm() -> None:
    config = KVTransferConfig(kv_connector_extra_config={"no-such-option": 1})
    with pytest.raises(ConfigError) as caught:
        ConnectorOptions.of(config)
    assert caught.value.hint is not None
    known = caught.value.hint.removeprefix("options: ").split(", ")
    assert set(known) - options_on_the_page_on_vllm() == set()


def test_vllm_is_asked_for_a_layout_only_where_the_option_says_one() -> None:
    assert layout_for_vllm({}) is None
    assert layout_for_vllm({"kv_cache_layout": "BLHNC"}) == "BLHNC"


def test_options_of_vllms_adapter_alone_are_not_passed_on() -> None:
    extra: dict[str, object] = {"kv_cache_layout": "HND", "layout_version": "1"}
    given = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra)
    inside = config_for_vllm(given)
    assert not extra.keys() & inside.kv_connector_extra_config.keys()


@pytest.mark.parametrize(
    "extra",
    [
        {"kv_cache_layout": "LHBNC"},
        {"kv_cache_layout": 1},
        {"kv_cache_layout": ["LBNHC"]},
        {"layout_version": ""},
        {"layout_version": 7},
    ],
)
def test_no_layout_and_no_version_of_one_is_refused_by_name(
    extra: dict[str, object],
) -> None:
    (name,) = extra
    given = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match=f"{name} is "):
        config_for_vllm(given)


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
        ("x", ".relative", "has no 'x'"),
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


@pytest.mark.parametrize(
    ("device", "variable", "option", "caches_on", "words"),
    [
        ("cpu", None, None, "cpu", ""),
        ("cuda", None, None, "cuda:3", ""),
        ("cuda", None, 1, "cuda:1", ""),
        ("cuda", "1", None, "cuda:1", ""),
        ("cuda", "1", 0, "cuda:0", ""),
        ("cuda:1", None, None, "cpu", "cuda:1, and the caches are on cpu"),
        ("cuda", None, 1, "cpu", "cuda:1, and the caches are on cpu"),
        ("cuda", None, 1, "cuda:0", "cuda:1, and the caches are on cuda:0"),
        ("cuda", "1", None, "cuda:0", "cuda:1, and the caches are on cuda:0"),
        ("cuda", "x", None, "cuda:1", "LOCAL_RANK is 'x'"),
        *((name, None, None, None, "is unknown") for name in ("tpu", "cuda:", "CPU")),
        ("cuda:x", None, None, None, "is unknown"),
    ],
)
def test_caches_are_on_the_device_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    variable: str | None,
    option: int | None,
    caches_on: str | None,
    words: str,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_RANK", variable)
    extra: dict[str, object] = {} if option is None else {"local_rank": option}
    config = KVTransferConfig(kv_buffer_device=device, kv_connector_extra_config=extra)
    refused = pytest.raises(ConfigError, match=words) if words else None
    with refused or contextlib.nullcontext():
        config.check_device(caches_on)

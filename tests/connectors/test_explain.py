from __future__ import annotations

from typing import Any

import pytest

import asynckv
from asynckv import LookupBuffer, serve
from asynckv.config import KVRole, KVTransferConfig
from asynckv.connectors.p2p.scheduler import P2PScheduler
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.registry import (
    Explained,
    KVConnectorKind,
    explain,
    explain_options,
)
from asynckv.errors import ConfigError


def explained(
    name: str | None = "P2PConnector", role: KVRole | None = "kv_both", **extra: object
) -> Explained:
    config = KVTransferConfig(
        kv_connector=name if role else None,
        kv_role=role,
        kv_connector_extra_config=extra,
    )
    return explain(config)


def test_a_config_that_works_has_facts_and_no_problems() -> None:
    found = explained(
        listen="tcp://127.0.0.1:7000", peers={"D": "tcp://127.0.0.1:7100"}
    )
    assert found.problems == ()
    words = "\n".join(found.facts)
    assert "serves at tcp://127.0.0.1:7000" in words
    assert "may talk to D: tcp://127.0.0.1:7100" in words


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
async def test_what_can_be_opened_is_explained_without_a_problem(role: KVRole) -> None:
    peer = {"peer_url": "mem://peer"} if role != "kv_producer" else {}
    extra: dict[str, object] = {**peer, "secrets": "ignored"}
    config = KVTransferConfig(kv_role=role, kv_port=0, kv_connector_extra_config=extra)
    async with LookupBuffer("1MiB") as buffer, serve("mem://peer", lookup=buffer):
        async with asynckv.open(config, drain_s=0):
            pass
    found = explain(config)
    assert found.problems == ()
    words = "\n".join(found.facts)
    assert ("asynckv.open serves at" in words) == (role != "kv_consumer")
    assert ("asynckv.open connects to mem://peer" in words) == (role != "kv_producer")
    assert "secrets is no option: did you mean 'secret_file'?" in words


def test_what_a_connector_would_lack_is_no_problem_of_a_node() -> None:
    found = explain(KVTransferConfig(kv_role="kv_producer"))
    assert found.problems == ()
    assert any("P2PConnector" in fact and '"peers"' in fact for fact in found.facts)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("NixlConnector", "P2PConnector"),
        ("P2pNcclConnector", "P2PConnector"),
        ("LMCacheConnectorV1", "StoreConnector"),
        ("OffloadingConnector", "StoreConnector"),
    ],
)
def test_a_connector_of_vllm_s_is_named_with_ours(name: str, ours: str) -> None:
    (problem,) = explained(name).problems
    assert f"{name} is vLLM's own connector; asynckv's is {ours}" in problem


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"listen": "tcp://127.0.0.1:7000"}, "prompts are kept until"),
        ({"mode": "store", "store": "mem://s"}, "saves to the store"),
    ],
)
def test_the_adapter_for_vllm_is_explained_without_vllm(
    extra: dict[str, Any], words: str
) -> None:
    found = explained("AsyncKVConnector", "kv_producer", **extra)
    assert found.problems == ()
    assert words in "\n".join(found.facts)
    (problem,) = explained("AsyncKVConnector", mode="x").problems
    assert "mode is 'x' (it is one of p2p, store)" in problem


def test_every_option_that_is_none_is_named() -> None:
    lisen, secret, field = explained(lisen="mem://a", secret="s", kv_port=1).problems
    assert "lisen is no option: did you mean 'listen'?" in lisen
    assert "secret is no option: did you mean 'secret_file'?" in secret
    assert "kv_port is no option, but a field beside" in field
    assert "options: allow_plaintext, chunk_tokens, connectors, " in field


@pytest.mark.parametrize("name", ["P2PConnector", "NixlConnector"])
def test_every_option_that_is_malformed_is_named(name: str) -> None:
    wrong: dict[str, Any] = {
        "listen": 7,
        "ttl_s": "x",
        "peers": ["x:1"],
        "tls": {},
        "fingerprint": 7,
    }
    found = explained(name, **wrong).problems
    for option in wrong:
        named = f"kv_connector_extra_config.{option}"
        assert len([one for one in found if named in one]) == 1, (option, found)
    assert len(found) == len(wrong) + (name == "NixlConnector")


def test_every_option_of_the_adapter_for_vllm_that_is_malformed_is_named() -> None:
    wrong: dict[str, Any] = {
        "mode": "x",
        "max_bytes": "lots",
        "kv_cache_layout": "N",
        "ttl_s": 0,
    }
    found = explained("AsyncKVConnector", layout_version=3, buffer_device="x", **wrong)
    for word in (
        "mode",
        "_device",
        "config.max_bytes",
        "kv_cache_layout",
        "ttl_s",
        "_version",
    ):
        assert any(word in problem for problem in found.problems), word
    assert len(found.problems) == 6


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "peers is empty"),
        ({"peers": ["tcp://10.0.0.1:1"]}, "beyond this host"),
        ({"peers": ["tls://127.0.0.1:1"]}, "needs certificates"),
        ({"peers": ["mem://a"], "listen": "tcp://127.0.0.1:0"}, "port 0"),
        ({"pers": []}, "did you mean"),
    ],
)
def test_what_is_wrong_is_said(extra: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in explained(**extra).problems)


@pytest.mark.parametrize(
    ("name", "direction", "role", "words"),
    [
        ("P2PConnector", "pull", "kv_producer", "what waits here has"),
        ("P2PConnector", "pull", "kv_consumer", "what is fetched has"),
        ("P2PConnector", "pull", "kv_both", "what waits here and what is fetched has"),
        ("P2PConnector", "push", "kv_producer", "what is pushed has"),
        ("P2PConnector", "push", "kv_consumer", "what waits here has"),
        ("P2PConnector", "push", "kv_both", "what waits here and what is pushed"),
        ("StoreConnector", "pull", "kv_both", "what is saved and loaded goes through"),
    ],
)
def test_what_has_memory_of_a_gpu_is_said(
    name: str, direction: str, role: KVRole, words: str
) -> None:
    config = KVTransferConfig(
        kv_connector=name,
        kv_role=role,
        kv_buffer_device="cuda",
        kv_connector_extra_config={"direction": direction},
    )
    (fact,) = [one for one in explain(config).facts if "caches must" in one]
    assert fact.split("; ")[1].startswith(words)


def test_other_connectors_are_explained_too() -> None:
    assert "store is not set" in explained("StoreConnector").problems[0]
    nameless = explained("StoreConnector", store="mem://s")
    assert "fingerprint is not set" in nameless.problems[0]
    stored = explained("StoreConnector", store="mem://s", fingerprint="toy")
    assert stored.problems == ()
    assert any("saves to and loads from" in fact for fact in stored.facts)
    assert "no connector 'x'" in explained("x").problems[0]
    assert any("kv_role" in problem for problem in explained(role=None).problems)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"kv_buffer_size": Infinity', "kv_buffer_size: inf is not"),
        (f'"kv_buffer_size": {10**400}', "is not a number of bytes"),
        ('"kv_rank": NaN', "kv_rank is nan"),
        ('"kv_buffer_device": "tpu"', "kv_buffer_device 'tpu' is unknown"),
        ('"kv_connector_extra_config": {"ttl_s": Infinity}', "ttl_s is inf"),
        ('"kv_connector_extra_config": {"ttl_s": NaN}', "ttl_s is nan"),
        (f'"kv_connector_extra_config": {{"ttl_s": {10**400}}}', "ttl_s"),
        ('"kv_connector_extra_config": {"load_timeout_s": 1e400}', "timeout_s is inf"),
        ('"kv_connector_extra_config": {"store_timeout": Infinity}', "store_timeout"),
        ('"kv_connector_extra_config": {"max_waiting_bytes": NaN}', "waiting_bytes"),
        ('"kv_connector_extra_config": {"port_offset": Infinity}', "port_offset"),
        ('"kv_connector_extra_config": {"consumer_tp_size": NaN}', "consumer_tp_size"),
    ],
)
def test_what_no_machine_has_is_wrong(text: str, words: str) -> None:
    try:
        config = KVTransferConfig.from_json(f'{{"kv_role": "kv_consumer", {text}}}')
    except ConfigError as exc:
        assert words in str(exc)
    else:
        assert any(words in problem for problem in explain(config).problems)


def test_two_connectors_from_peer_to_peer_are_one_too_many() -> None:
    one = {"kv_connector": "P2PConnector", "kv_connector_extra_config": {}}
    (problem,) = explained("MultiConnector", connectors=[one, one]).problems
    assert "one P2PConnector" in problem and "peers" in problem


@pytest.mark.parametrize("extra", [None, [], "x", 3])
def test_a_child_whose_options_are_no_object_is_refused(extra: object) -> None:
    child = {"kv_connector": "StoreConnector", "kv_connector_extra_config": extra}
    (problem,) = explained("MultiConnector", connectors=[child]).problems
    assert f"kv_connector_extra_config is {extra!r}" in problem


def test_connectors_of_connectors_are_each_looked_at_once() -> None:
    child: dict[str, object] = {"kv_connector": "StoreConnector"}
    for _ in range(30):  # twice each would be 2 to the 30th
        extra = {"connectors": [child]}
        child = {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    (problem,) = explained("MultiConnector", connectors=[child]).problems
    assert problem.startswith("connector 1: " * 31 + "store is not set")


def test_of_several_connectors_each_is_explained() -> None:
    found = explained("MultiConnector", connectors=[{"kv_connector": "StoreConnector"}])
    assert found.problems[0].startswith("connector 1: store is not set")
    assert any(fact.startswith("  1: ") for fact in found.facts)


OWN = KVConnectorKind("OWN", P2PScheduler, P2PScheduler, P2PWorker)
"""A connector that is not asynckv's, though it is made of one."""


@pytest.mark.parametrize("extra", [{}, {"own_option": 3, "peers": 3}])
def test_of_a_connector_of_one_s_own_only_what_is_known_is_said(
    extra: dict[str, Any],
) -> None:
    mine = {"kv_connector": "OWN", "kv_connector_module_path": __name__}
    whole = {**mine, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    found = explain(KVTransferConfig(**whole))  # type: ignore[arg-type]
    assert found.problems == ()
    assert [fact.partition(":")[0] for fact in found.facts] == ["kv_both", "connector"]
    assert explain_options(whole) == ()
    assert explained("MultiConnector", connectors=[whole]).problems == ()


def test_options_of_the_node_are_judged_for_any_connector() -> None:
    whole = {
        "kv_connector": "OWN",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tls": 3, "own_option": 3},
    }
    (problem,) = explain(KVTransferConfig(**whole)).problems  # type: ignore[arg-type]
    assert "config.tls is 3" in problem
    assert explain_options(whole) == (problem,)


def test_options_are_not_judged_where_the_module_is_not_found() -> None:
    config = KVTransferConfig(
        kv_connector="OWN",
        kv_role="kv_both",
        kv_connector_module_path="no.such.module",
        kv_connector_extra_config={"own_option": 3},
    )
    (problem,) = explain(config).problems
    assert "'no.such.module' has no 'OWN'" in problem

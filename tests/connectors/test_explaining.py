from __future__ import annotations

from typing import Any

import pytest

from asynckv.config import KVRole, KVTransferConfig
from asynckv.connectors.explaining import Explained, explain


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


def test_other_connectors_are_explained_too() -> None:
    assert "store is not set" in explained("StoreConnector").problems[0]
    nameless = explained("StoreConnector", store="mem://s")
    assert "fingerprint is not set" in nameless.problems[0]
    stored = explained("StoreConnector", store="mem://s", fingerprint="toy")
    assert stored.problems == ()
    assert any("saves to and loads from" in fact for fact in stored.facts)
    assert "no connector 'x'" in explained("x").problems[0]
    assert any("kv_role" in problem for problem in explained(role=None).problems)


def test_of_several_connectors_each_is_explained() -> None:
    found = explained("MultiConnector", connectors=[{"kv_connector": "StoreConnector"}])
    assert found.problems[0].startswith("connector 1: store is not set")
    assert any(fact.startswith("  1: ") for fact in found.facts)

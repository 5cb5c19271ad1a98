"""vLLM pickles what the roles tell each other; nothing of it may be lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm

_CODE = """
import copy
from asynckv.abc import KVConnectorHandshake, KVTransferResults
from asynckv.connectors.requests import LoadOrder, P2PMetadata
from asynckv.integrations.vllm.messages import (
    AsyncKVHandshake, AsyncKVMetadata, AsyncKVWorkerMetadata,
)

orders = P2PMetadata(loads=(LoadOrder("a", "t", "p", ((1, 2),), digest=b"x"),))
for told in (
    AsyncKVMetadata(orders, must_be_quiet=frozenset({"a"})),
    AsyncKVHandshake(KVConnectorHandshake(1, "incarnation"), "backend"),
    AsyncKVWorkerMetadata(KVTransferResults(reasons={"a": "b"})),
):
    copied = copy.deepcopy(told)  # by the same protocol as pickle
    assert copied == told and copied is not told

nothing = KVTransferResults(invalid_block_ids=frozenset({1}))
assert AsyncKVWorkerMetadata.of(nothing) is None
failed = [
    AsyncKVWorkerMetadata.of(KVTransferResults(frozenset(), name, name, name))
    for name in (frozenset("a"), frozenset("b"))
]
full = KVTransferResults(frozenset("a"), frozenset("a"), full_sending=frozenset("a"))
assert AsyncKVWorkerMetadata.of(full).aggregate(failed[0]).ended.full_sending == {"a"}
assert failed[0].aggregate(failed[1]).ended.failed_recving == {"a", "b"}
"""


def test_what_the_roles_tell_each_other_arrives_whole() -> None:
    subprocess.run([sys.executable, "-c", _CODE], check=True, timeout=60)

"""vLLM pickles what the roles tell each other; nothing of it may be lost."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from asynckv.integrations.vllm.plugin import log_as_vllm
from harness.forks import ForkServer


def test_it_is_an_entry_point_that_vllm_looks_for() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    values = {point.name: point.value for point in found}
    if "asynckv" not in values:
        pytest.skip("asynckv is not installed with its entry points here")
    assert values["asynckv"] == "asynckv.integrations.vllm.plugin:register"


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """asynckv's logger and vLLM's, which has a handler; both are left as they were."""
    both = logging.getLogger("asynckv"), logging.getLogger("vllm")
    before = [(one.handlers[:], one.level, one.propagate) for one in both]
    both[1].handlers, both[1].propagate = [logging.NullHandler()], False
    both[1].setLevel("INFO")
    yield both
    for one, (handlers, level, propagate) in zip(both, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


def test_what_the_core_logs_appears_as_vllm_s_own_lines_do(
    loggers: tuple[logging.Logger, logging.Logger],
) -> None:
    ours, vllm = loggers
    for _ in range(2):
        log_as_vllm()
    assert ours.handlers == vllm.handlers and not ours.propagate
    assert logging.getLogger("asynckv.connectors").isEnabledFor(logging.INFO)


def test_whoever_has_configured_the_log_is_left_alone(
    loggers: tuple[logging.Logger, logging.Logger],
) -> None:
    ours, _ = loggers
    ours.setLevel("ERROR")
    log_as_vllm()
    assert not ours.handlers and ours.level == logging.ERROR


def test_without_vllm_it_does_nothing() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None;"
        "from asynckv.integrations.vllm import register; register();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


_OLD = """
import sys, types
for name in ("", ".distributed", ".distributed.kv_transfer",
             ".distributed.kv_transfer.kv_connector",
             ".distributed.kv_transfer.kv_connector.v1",
             ".distributed.kv_transfer.kv_connector.v1.base"):
    sys.modules["vllm" + name] = types.ModuleType("vllm" + name)
sys.modules["vllm"].__version__ = "0.20.1"
"""


_NONE = """
for name in [one for one in sys.modules if one.partition(".")[0] == "vllm"]:
    del sys.modules[name]
sys.modules["vllm"] = None
"""
_IMPORT = """
try:
    from asynckv.integrations.vllm import AsyncKVConnector
except ImportError as exc:
    print(exc)
"""


@pytest.mark.multiprocess
async def test_with_another_vllm_it_says_which_it_needs(forks: ForkServer) -> None:
    said = await forks.printed_by(_OLD + _IMPORT + _NONE + _IMPORT)
    old, none = said.splitlines()
    assert "needs vLLM 0.32, and here is 0.20.1: cannot import name" in old
    assert "needs vLLM 0.32, and none can be imported here" in none
    assert old.startswith("AsyncKVConnector") and none.startswith("AsyncKVConnector")


@pytest.mark.vllm
def test_the_name_alone_finds_the_connector_and_again_is_nothing() -> None:
    code = (
        "from vllm.distributed.kv_transfer.kv_connector import factory;"
        "from asynckv.integrations.vllm.plugin import NAME, register;"
        "register(); register();"
        "find = factory.KVConnectorFactory.get_connector_class_by_name;"
        "assert find(NAME).__module__ == 'asynckv.integrations.vllm.connector'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.vllm
def test_importing_the_connector_starts_no_thread() -> None:
    code = (
        "import threading, vllm.distributed.kv_transfer.kv_connector.v1.base;"
        "before = threading.active_count();"
        "from asynckv.integrations.vllm import AsyncKVConnector;"
        "assert threading.active_count() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


_MESSAGES = """
import copy
from asynckv.abc import KVConnectorHandshake, KVTransferResults
from asynckv.connectors.requests import LoadRequest, P2PMetadata
from asynckv.integrations.vllm.messages import (
    AsyncKVHandshake, AsyncKVMetadata, AsyncKVWorkerMetadata,
)

orders = P2PMetadata(loads=(LoadRequest("a", "t", "p", ((1, 2),), digest=b"x"),))
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


@pytest.mark.vllm
def test_what_the_roles_tell_each_other_arrives_whole() -> None:
    subprocess.run([sys.executable, "-c", _MESSAGES], check=True, timeout=60)

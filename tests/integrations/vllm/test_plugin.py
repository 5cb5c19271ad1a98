from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest


def test_it_is_an_entry_point_that_vllm_looks_for() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    values = {point.name: point.value for point in found}
    if "asynckv" not in values:
        pytest.skip("asynckv is not installed with its entry points here")
    assert values["asynckv"] == "asynckv.integrations.vllm.plugin:register"


def test_without_vllm_it_does_nothing() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None;"
        "from asynckv.integrations.vllm import register; register();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


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

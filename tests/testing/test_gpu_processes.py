from __future__ import annotations

import importlib.util

import pytest

from asynckv.testing.gpu_processes import BEGIN, why_not


def test_a_gpu_that_is_not_there_can_always_be_had() -> None:
    assert why_not("fake") == ""


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy here")
def test_without_a_driver_the_reason_is_told() -> None:
    assert "CuPy" in why_not("real")


def test_how_such_a_process_begins_is_python() -> None:
    compile(BEGIN, "begin", "exec")

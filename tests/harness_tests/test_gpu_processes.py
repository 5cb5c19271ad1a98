from __future__ import annotations

import importlib.util

import pytest

from harness.children import line_of
from harness.gpu_processes import BEGIN, running, usable, why_not


def test_a_gpu_that_is_not_there_can_always_be_had() -> None:
    assert why_not("fake") == ""


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy here")
def test_without_a_driver_the_reason_is_told() -> None:
    assert "CuPy" in why_not("real")


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy here")
def test_without_a_driver_what_needs_it_is_skipped() -> None:
    assert usable("fake") == "fake"
    with pytest.raises(pytest.skip.Exception, match="CuPy"):
        usable("real")


@pytest.mark.multiprocess
@pytest.mark.slow
async def test_such_a_process_has_its_gpu() -> None:
    code = "print(open_device().name, sys.argv[2])"
    async with running(code, "fake", "word") as process:
        assert await line_of(process) == "cuda:0 word"


def test_how_such_a_process_begins_is_python() -> None:
    compile(BEGIN, "begin", "exec")

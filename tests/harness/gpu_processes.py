"""How a process of a test gets its GPU: the real one, or one that is not there."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import pytest

from asynckv.devices.cupy import open_cuda
from asynckv.errors import GPUUnavailable

__all__ = ("BEGIN", "GPU_KINDS", "GpuKind", "usable", "why_not")

GpuKind: TypeAlias = Literal["fake", "real"]

GPU_KINDS: Final[tuple[Any, ...]] = (
    "fake",
    pytest.param("real", marks=pytest.mark.gpu),
)
"""What a test is parametrised by that runs on both."""

BEGIN: Final = """
import asyncio, asynckv, sys, torch
def open_device():
    if sys.argv[1] == "real":
        return "cuda:0"
    from harness.fake_devices import fake_device_of
    from harness.fake_gpus import FakeGpus
    return fake_device_of(FakeGpus().process()).device
async def order():
    return (await asyncio.to_thread(sys.stdin.readline)).strip()
def tell(*words):
    print(*words, flush=True)
"""
"""How the code of such a process begins: ``sys.argv[1]`` is the kind.

It waits with ``order()`` for a line that a test says, and ``tell()``s it one.
"""


def why_not(kind: GpuKind) -> str:
    """Say why a test cannot run on that kind; empty if it can."""
    if kind == "fake":
        return ""
    try:
        open_cuda()
    except GPUUnavailable as exc:
        return str(exc)
    return ""


def usable(kind: GpuKind) -> GpuKind:
    """Return it; a test that cannot run on that kind is skipped, and says why."""
    if reason := why_not(kind):
        pytest.skip(reason)
    return kind

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from asynckv.errors import GPUFailed
from asynckv.testing.blocked import until
from harness.fake_gpus import FakeGpus, FakeProcess

IMPORTER = """
import sys
from harness.fake_gpus import FakeGpus
cuda = FakeGpus().process().cuda
memory = cuda.open_memory(bytes.fromhex(sys.argv[1]), 8)
assert cuda.view(memory).tobytes() == b"exported"
cuda.view(memory)[:] = list(b"imported")
"""


def test_another_real_process_opens_what_was_exported(near: FakeProcess) -> None:
    memory = near.cuda.malloc(8)
    near.cuda.view(memory)[:] = list(b"exported")
    handle = near.cuda.export(memory)
    subprocess.run([sys.executable, "-c", IMPORTER, handle.hex()], check=True)
    assert near.cuda.view(memory).tobytes() == b"imported"


def test_what_a_dead_real_process_exported_is_gone(near: FakeProcess) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    handle = bytearray(near.cuda.export(near.cuda.malloc(8)))
    handle[:8] = gone.pid.to_bytes(8, "little")
    with pytest.raises(GPUFailed, match="is gone"):
        near.cuda.open_memory(bytes(handle), 8)
    assert gone.pid != os.getpid()


def test_whoever_waits_is_let_go_at_the_end() -> None:
    gpus = FakeGpus()
    gpus.close()
    with pytest.raises(GPUFailed, match="nobody waits any more for the moon"):
        gpus.block(lambda: False, "the moon")
    assert gpus.is_closed


async def test_who_is_kept_can_be_let_go() -> None:
    gpus = FakeGpus()
    with ThreadPoolExecutor() as threads:
        kept = threads.submit(gpus.block, lambda: False, "the moon")
        await until(lambda: gpus.kept == ["the moon"])
        gpus.release()
        with pytest.raises(GPUFailed, match="nobody waits any more for the moon"):
            kept.result()
    gpus.block(lambda: True, "what is there")
    assert not gpus.kept and not gpus.is_closed


def test_delays_are_the_seeds_own() -> None:
    first, same = (FakeGpus(seed=5, max_delay=9) for _ in range(2))
    found = [first.delay() for _ in range(20)]
    assert found == [same.delay() for _ in range(20)]
    assert max(found) > 0 and FakeGpus().delay() == 0

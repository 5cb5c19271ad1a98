from __future__ import annotations

import subprocess
import sys

import pytest

from asynckv.cli.demo.messages import (
    ReadBack,
    WaitReturned,
    encode_line,
)

pytestmark = pytest.mark.multiprocess

WORKER = """
import asyncio, threading
from asynckv.cli.demo.messages import *
from asynckv.cli.demo.worker import Stage

async def do(order):
    if isinstance(order, ReadBack):
        print("a print")
        return Text("done")
    if isinstance(order, WaitReturned):
        threading.Thread(target=threading.Event().wait, daemon=False).start()
        await asyncio.Event().wait()
    raise ValueError("unknown")

stage = Stage()
asyncio.run(stage.perform(do))
"""


def talk(*lines: bytes) -> subprocess.CompletedProcess[bytes]:
    """Give a worker these lines, hang up, and wait until it has ended."""
    return subprocess.run(
        [sys.executable, "-c", WORKER],
        input=b"".join(lines),
        capture_output=True,
        timeout=30,
        check=False,
    )


def test_a_worker_ends_when_its_parent_hangs_up() -> None:
    done = talk()
    assert (done.returncode, done.stdout) == (0, b"")


def test_prints_go_to_the_standard_error() -> None:
    done = talk(encode_line(ReadBack(())))
    assert b"a print" in done.stderr
    assert b"a print" not in done.stdout


def test_what_is_under_way_is_cut_off() -> None:
    done = talk(encode_line(WaitReturned()))
    assert (done.returncode, done.stdout) == (0, b"")


def test_a_line_that_is_no_order_ends_the_worker() -> None:
    assert talk(b"nonsense\n").returncode != 0

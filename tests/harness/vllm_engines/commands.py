"""``vllm serve`` and what stands beside it, as commands of a shell; asked by HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

from harness.vllm_engines.engine import ENVIRONMENT

__all__ = ("OPTIONS", "Command", "get")

_READY_S: Final = 200.0
OPTIONS = (
    *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
    *("--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--num-gpu-blocks-override", "256"),
)
"""What a tiny model is served with."""


class Command:
    """A command and all that it starts, until the end of the block."""

    def __init__(self, command: list[str], log: Path) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        serving = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PATH": path}
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **serving},
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_ready(self, url: str) -> None:
        """Wait until it answers at ``url``."""
        deadline = time.monotonic() + _READY_S
        while True:
            with contextlib.suppress(OSError):
                get(url)
                return
            log = self.log.read_text(errors="replace")[-4000:]
            assert self.process.poll() is None, log
            assert time.monotonic() < deadline, log
            threading.Event().wait(0.2)


def get(url: str, body: dict[str, Any] | None = None) -> str:
    """Return what is at ``url``, or is answered to ``body``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        told: bytes = answer.read()
    return told.decode()

from __future__ import annotations

import signal
import subprocess

import pytest

from harness.children import ask, line_of
from harness.forks import ForkServer

pytestmark = pytest.mark.multiprocess

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


async def test_what_is_said_to_it_it_reads_and_what_it_prints_is_told(
    forks: ForkServer,
) -> None:
    async with forks.running(ECHO) as one, forks.running(ECHO) as other:
        assert one.pid != other.pid
        assert await ask(one, "1") == "1" and await ask(other, "2") == "2"
        one.stdin.write_eof()
        assert await line_of(one) == ""
        assert await one.wait() == 0


async def test_it_has_its_arguments_and_what_this_process_has_of_variables(
    forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TEST", "of mine")
    code = "import os, sys\nprint(*sys.argv[1:], os.environ['A_TEST'], flush=True)"
    async with forks.running(code, "a", "b") as process:
        assert await line_of(process) == "a b of mine"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
async def test_how_it_ended_is_told(forks: ForkServer, code: str, status: int) -> None:
    async with forks.running(code) as process:
        assert await process.wait() == status
        process.kill()  # which is no error


async def test_leaving_kills_what_still_runs(forks: ForkServer) -> None:
    async with forks.running(ECHO) as process:
        assert await ask(process, "1") == "1"
    assert await process.wait() == -signal.SIGKILL


async def test_its_errors_are_told_apart_and_its_variables_can_be_others(
    forks: ForkServer,
) -> None:
    code = "import os, sys\nprint(*os.environ)\nsys.exit('an error')"
    environ, pipe = {"A_TEST": "of mine"}, subprocess.PIPE
    async with forks.running(code, stderr=pipe, environ=environ) as process:
        assert process.stderr is not None
        assert await process.stderr.read() == b"an error\n"
        assert await process.stdout.read() == b"A_TEST\n"


async def test_a_signal_that_is_sent_to_it_ends_it(forks: ForkServer) -> None:
    async with forks.running(ECHO) as process:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == -signal.SIGTERM


async def test_what_it_printed_is_told_with_its_errors(forks: ForkServer) -> None:
    code = "import sys\nprint(sys.argv[1], flush=True)\nsys.exit('an error')"
    assert await forks.printed_by(code, "1") == "1\nan error\n"

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def house(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with the rules of this one."""
    pytester.mkdir("tests")
    for name in ("pyproject.toml", "tests/conftest.py"):
        text = (HERE.parent / name).read_text()
        sooner = text.replace("GRACE_S: Final = 1.0", "GRACE_S: Final = 0.1")
        (pytester.path / name).write_text(sooner)
    return pytester


def run(house: pytest.Pytester, source: str) -> pytest.RunResult:
    (house.path / "tests" / "test_it.py").write_text(source)
    return house.runpytest_subprocess()


CLEAN = """
import asyncio, pytest, socket

@pytest.mark.both_loops
async def test_loop():
    await asyncio.sleep(0)

def test_closes():
    socket.socket().close()
"""

UNTIDY = """
import asyncio, os, socket, subprocess, threading

kept = []

async def test_task():
    kept.append(asyncio.create_task(asyncio.Event().wait()))

async def test_error_in_callback():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)

def test_socket():
    kept.append(socket.socket())

def test_pipe():
    kept.append(os.pipe())

def test_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, daemon=True).start()

def test_process():
    kept.append(subprocess.Popen(["sleep", "5"]))
"""


HANGING = """
import asyncio, pytest

async def deeper():
    await asyncio.Event().wait()

@pytest.mark.timeout(0.5)
async def test_hangs():
    await deeper()
"""

BLOCKING = """
import time, asynckv

async def test_blocks():
    inside = compile("sleep(0.01)", asynckv.__file__, "exec")
    exec(inside, {"sleep": time.sleep})
"""


def test_tidy_tests_pass_on_both_loops(house: pytest.Pytester) -> None:
    run(house, CLEAN).assert_outcomes(passed=3)


def test_whatever_a_test_leaves_behind_fails_it(house: pytest.Pytester) -> None:
    result = run(house, UNTIDY)
    result.assert_outcomes(passed=6, errors=6)
    result.stdout.fnmatch_lines_random(
        [
            "*<Task pending*",
            "*ZeroDivisionError*",
            "*descriptor *socket:*",
            "*descriptor *pipe:*",
            "*<Thread(*",
            "*process *",
        ]
    )


def test_a_blocking_call_of_the_package_fails_the_test(house: pytest.Pytester) -> None:
    result = run(house, BLOCKING)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*BlockingError*time.sleep*"])


def test_a_hang_is_one_failure_that_says_where(house: pytest.Pytester) -> None:
    result = run(house, HANGING)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_it.py:* in deeper"])

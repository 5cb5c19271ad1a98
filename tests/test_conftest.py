from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


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


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run of all of them says, in a folder with the rules of this one."""
    house = tmp_path_factory.mktemp("house")
    (house / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        text = (HERE.parent / name).read_text()
        sooner = text.replace("GRACE_S: Final = 1.0", "GRACE_S: Final = 0.1")
        (house / name).write_text(sooner)
    sources = {"c": CLEAN, "u": UNTIDY, "h": HANGING, "b": BLOCKING}
    for name, source in sources.items():
        (house / "tests" / f"test_{name}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=house, capture_output=True, text=True)
    return done.stdout


def outcomes_in(told: str, name: str) -> list[str]:
    """How each test of that file ended, and whether it did so tidily."""
    return re.findall(rf"^tests/test_{name}\.py::.* (PASSED|FAILED|ERROR)", told, re.M)


def section_of(told: str, test: str) -> str:
    """What is told of a test that did not pass."""
    text = told.partition(f" {test} __")[2]
    return re.split(r"^_{3,} .* _{3,}$", text, flags=re.M)[0]


def test_tidy_tests_pass_on_both_loops(told: str) -> None:
    assert outcomes_in(told, "c") == ["PASSED"] * 3


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("test_task", "<Task pending"),
        ("test_error_in_callback", "ZeroDivisionError"),
        ("test_socket", "socket:"),
        ("test_pipe", "pipe:"),
        ("test_thread", "<Thread("),
        ("test_process", "process "),
    ],
)
def test_whatever_a_test_leaves_behind_fails_it(
    told: str, test: str, words: str
) -> None:
    assert words in section_of(told, f"ERROR at teardown of {test}")


def test_who_leaves_something_behind_has_passed_and_is_one_error(told: str) -> None:
    assert outcomes_in(told, "u") == ["PASSED", "ERROR"] * 6


def test_a_blocking_call_of_the_package_fails_the_test(told: str) -> None:
    assert outcomes_in(told, "b") == ["FAILED"]
    assert re.search("BlockingError.*time.sleep", section_of(told, "test_blocks"))


def test_a_hang_is_one_failure_that_says_where(told: str) -> None:
    assert outcomes_in(told, "h") == ["FAILED"]
    assert re.search(r"test_h\.py:\d+ in deeper", section_of(told, "test_hangs"))

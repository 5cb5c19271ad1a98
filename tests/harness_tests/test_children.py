from __future__ import annotations

import asyncio
import sys

import pytest

from harness.children import ask, line_of, running, tell

pytestmark = pytest.mark.multiprocess

ECHO = """
import sys
print(sys.argv[1], flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""


async def test_a_process_talks_line_by_line_and_is_gone_when_it_is_left() -> None:
    async with running(ECHO, "here") as process:
        assert await line_of(process) == "here"
        assert [await ask(process, word) for word in ("one", "two")] == ["one", "two"]
    assert process.returncode


async def test_one_that_has_ended_says_nothing_more() -> None:
    async with running("print('end')") as process:
        assert [await line_of(process) for _ in range(2)] == ["end", ""]


async def test_who_talks_with_nobody_is_told() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
    with pytest.raises(ValueError, match="prints goes elsewhere"):
        await line_of(process)
    with pytest.raises(ValueError, match="reads from elsewhere"):
        await tell(process, "word")
    assert await process.wait() == 0

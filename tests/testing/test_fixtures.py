from __future__ import annotations

import pytest

USES = """
import asyncio
import pytest
import torch
import asynckv

@pytest.mark.asyncio
async def test_memory(kv_pair):
    assert kv_pair.server.url.startswith("mem://")
    await kv_pair.lookup.insert([1], None, torch.ones(3), None, None)
    assert (await kv_pair.peer.lookup.drop_select([1])).nbytes == 20

@pytest.mark.asyncio
async def test_tcp(kv_tcp_pair):
    assert kv_tcp_pair.server.url.startswith("tcp://127.0.0.1:")
    await kv_tcp_pair.peer.store.put("name", torch.ones(3))
    assert await kv_tcp_pair.store.contains(["name"]) == (True,)

@pytest.mark.asyncio
async def test_faults(kv_faults):
    waiting = asyncio.create_task(kv_faults.peer.lookup.drop_select([1]))
    with kv_faults.reset() as fault:
        await fault.acted()
    await kv_faults.lookup.insert([1], None, torch.ones(3), None, None)
    assert (await waiting).nbytes == 20
"""


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_the_fixtures_open_pairs(pytester: pytest.Pytester, mode: str) -> None:
    pytester.makeini(
        f"[pytest]\nasyncio_mode = {mode}\nfilterwarnings = error\n"
        "asyncio_default_fixture_loop_scope = function"
    )
    pytester.makepyfile(USES)
    result = pytester.runpytest_subprocess(
        "--disable-plugin-autoload",
        "-p",
        "pytest_asyncio.plugin",
        "-p",
        "asynckv.testing.plugin",
    )
    result.assert_outcomes(passed=3)


def test_whoever_looks_finds_what_they_are(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(
        "--disable-plugin-autoload",
        "-p",
        "pytest_asyncio.plugin",
        "-p",
        "asynckv.testing.plugin",
        "--fixtures",
    )
    result.stdout.fnmatch_lines_random(["kv_pair*", "kv_tcp_pair*", "kv_faults*"])

"""``asynckv serve`` as people run it: real processes, real sockets, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import asynckv
from asynckv import TLS
from asynckv.cli.serve.running import EndDeadline
from asynckv.errors import PeerLost
from asynckv.testing.certificates import Authority
from harness.forks import ForkServer
from harness.serve_processes import ServeProcess, http_get, serving
from harness.stuck_tiers import add_stuck_tiers

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a folder in which a process finds tiers that get stuck."""
    add_stuck_tiers(tmp_path)
    return tmp_path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a file of options."""
    file = tmp_path / "serve.toml"
    file.write_text('store = "1MiB"\nlookup = "2MiB"\nhttp = "127.0.0.1:0"\n')
    return file


async def test_a_process_of_its_own_holds_what_others_put() -> None:
    async with serving("--store", "8MiB") as served:
        url = await served.until_serving()
        async with asynckv.connect(url, identity="engine") as peer:
            await peer.store.put("a", torch.ones(3))
            assert await peer.store.match_prefix(["a", "b"]) == 1
        served.signal()
        assert await served.ended() == 0
    first, *_, engine, left, draining, ended = served.log
    assert f"INFO serving at {url}, with no tiers" in first
    assert f"INFO {url}: engine connected, payload by " in engine
    assert left.endswith(f"INFO {url}: engine left")
    assert "INFO draining on SIGTERM, for 30 s at most" in draining
    assert ended.endswith("INFO ended")


async def test_what_was_put_is_on_disk_after_a_signal_and_in_the_next_process(
    forks: ForkServer, tmp_path: Path
) -> None:
    options = ("--store", "32MiB", "--tier", f"disk://{tmp_path}/kv?max=64MiB")
    async with serving(*options, forks=forks) as served:
        async with asynckv.connect(await served.until_serving()) as peer:
            for number in range(8):
                value = torch.full((2**18,), number, dtype=torch.uint8)
                await peer.store.put(f"key {number}", value)
            served.signal()
            assert await served.ended() == 0
    # A disk that is slow is not waited for.
    said = re.search(r"disk: (\d) puts accepted", "\n".join(served.log))
    assert said is not None and int(said[1]) > 0, served.log
    there: list[int] = []
    async with serving(*options, forks=forks) as served, asyncio.timeout(30):
        async with asynckv.connect(await served.until_serving()) as peer:
            while len(there) < int(said[1]):  # it is scanned meanwhile
                keys = [f"key {number}" for number in range(8)]
                found = enumerate(await peer.store.get_many(keys))
                there = [number for number, value in found if value is not None]
            for number in there:
                kept = await peer.store.get(f"key {number}")
                assert kept is not None and kept[0] == number


async def test_probes_say_whether_it_is_alive_and_ready(
    forks: ForkServer, path: Path
) -> None:
    tier = "stuck:?how=task&call=store"
    options = ("--store", "8MiB", "--tier", tier, "--http", "127.0.0.1:0")
    async with serving(*options, path=path, forks=forks) as served:
        http = await served.http_url()
        url = await served.until_serving()
        assert await http_get(f"{http}/readyz") == (200, "serving\n")
        async with asynckv.connect(url) as peer:
            await peer.store.put("key", torch.ones(3))
            served.signal()
            await served.until_logged("draining")
            assert await http_get(f"{http}/readyz") == (503, "draining\n")
            assert await http_get(f"{http}/healthz") == (200, "alive\n")
            with pytest.raises(PeerLost):
                await asynckv.connect(url).__aenter__()


async def test_metrics_count_what_peers_do_and_what_tiers_have(
    forks: ForkServer, tmp_path: Path
) -> None:
    tier = f"disk://{tmp_path}/kv?max=64MiB"
    options = ("--store", "8MiB", "--lookup", "8MiB", "--http", "127.0.0.1:0")
    async with serving(*options, "--tier", tier, forks=forks) as served:
        http = await served.http_url()
        async with asynckv.connect(await served.until_serving()) as peer:
            await peer.store.put("key", torch.ones(3))
            await peer.store.get("key")
            status, text = await http_get(f"{http}/metrics")
    assert status == 200
    for line in (
        "asynckv_peers 1.0",
        "asynckv_store_hits_total 1.0",
        "asynckv_store_puts_total 1.0",
        'asynckv_tier_hits_total{tier="disk"} 0.0',
        'asynckv_request_seconds_count{request="get"} 1.0',
    ):
        assert f"\n{line}\n" in text, line


@pytest.mark.parametrize(
    ("how", "call"),
    [
        ("thread", "fetch"),
        pytest.param("thread", "store", marks=pytest.mark.trust),
        pytest.param("task", "store", marks=pytest.mark.trust),
        ("disk", "pwritev"),
    ],
)
async def test_it_ends_in_time_though_a_call_of_a_tier_never_returns(
    forks: ForkServer, how: str, call: str, path: Path
) -> None:
    tier = f"stuck://{path}/kv?how={how}&call={call}"
    options = ("--store", "8MiB", "--tier", tier, "--drain-s", "1")
    async with serving(*options, path=path, forks=forks) as served:
        async with asynckv.connect(await served.until_serving()) as peer:
            await peer.store.put("key", torch.ones(2**18))
            getting = asyncio.create_task(peer.store.get("other"))
            assert await served.line() == "stuck"
            assert await seconds_to_end(served) < 3.0
            await asyncio.wait({getting})
            getting.exception()


async def test_it_ends_in_time_though_a_read_of_the_disk_never_returns(
    forks: ForkServer, path: Path
) -> None:
    place = f"{path}/kv"
    on_disk = ("--store", "8MiB", "--tier", f"disk://{place}?max=16MiB")
    async with serving(*on_disk, forks=forks) as served:
        async with asynckv.connect(await served.until_serving()) as peer:
            await peer.store.put("key", torch.ones(2**18))
        await seconds_to_end(served)
    tier = f"stuck://{place}?how=disk&call=preadv"
    async with serving(
        "--store", "8MiB", "--tier", tier, path=path, forks=forks
    ) as served:
        lines = await served.line(), await served.line()  # it is scanned meanwhile
        assert any("stuck" in line for line in lines)  # two threads write it
        assert await seconds_to_end(served) < 2.5


async def test_it_ends_in_time_though_a_tier_does_not_close(
    forks: ForkServer, path: Path
) -> None:
    tier = "stuck:?how=task&call=aclose"
    async with serving(
        "--store", "8MiB", "--tier", tier, path=path, forks=forks
    ) as served:
        await served.until_serving()
        assert await seconds_to_end(served) < 4.0
    assert any("something does not end" in line for line in served.log)


async def test_a_tier_that_does_not_open_keeps_nobody_from_ending_it(
    forks: ForkServer, path: Path
) -> None:
    tier = "stuck:?how=thread&call=probe"
    options = ("--store", "8MiB", "--tier", tier, "--http", "127.0.0.1:0")
    async with serving(*options, path=path, forks=forks) as served:
        http = await served.http_url()
        assert await http_get(f"{http}/readyz") == (503, "starting\n")
        assert await served.line() == "stuck"
        assert await seconds_to_end(served) < 2.5


async def seconds_to_end(served: ServeProcess) -> float:
    """Ask a process to end; return how long that took."""
    began_s = time.monotonic()
    served.signal()
    assert await served.ended() == 0
    return time.monotonic() - began_s


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(
    forks: ForkServer, first: signal.Signals
) -> None:
    async with serving("--lookup", "8MiB", forks=forks) as served:
        async with asynckv.connect(await served.until_serving()) as peer:
            await peer.lookup.insert([1], None, None, None, None)
            served.signal(first)
            await served.until_logged("draining")  # for 30 s: nobody takes the entry
            served.signal(signal.SIGTERM)
            assert await served.ended() == -signal.SIGTERM


@pytest.fixture
def container() -> str:
    """Return a command that makes a process the first one of its namespace."""
    command = "unshare --user --map-root-user --pid --fork --kill-child"
    if shutil.which("unshare") is None or subprocess.call([*command.split(), "true"]):
        pytest.skip("no process may have a namespace of its own here")
    return command


async def test_a_second_signal_ends_the_first_process_of_a_container(
    container: str,
) -> None:
    async with serving("--lookup", "8MiB", runner=container) as served:
        async with asynckv.connect(await served.until_serving()) as peer:
            await peer.lookup.insert([1], None, None, None, None)
            first = _child_of(served.process.pid)
            os.kill(first, signal.SIGTERM)
            await served.until_logged("draining")
            os.kill(first, signal.SIGTERM)
            assert await served.ended() == 128 + signal.SIGTERM


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


SLOW_TO_IMPORT = """
import signal
print("importing", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_it_imports_ends_it_without_a_word(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "cyclopts.py").write_text(SLOW_TO_IMPORT)
    async with serving(path=tmp_path) as served:
        assert await served.line() == "importing"
        served.signal(number)
        assert await served.ended() == -number
    assert served.log == []


async def test_it_ends_well_though_standard_streams_are_closed() -> None:
    async with serving("--store", "8MiB", redirect="<&- 2>&-") as served:
        async with asynckv.connect(await served.until_serving()) as peer:
            await peer.store.put("key", torch.ones(3))
        served.signal()
        assert await served.ended() == 0


@pytest.fixture
def full_pipe(tmp_path: Path) -> Iterator[Path]:
    """Return a pipe that takes nothing more: nobody reads it."""
    path = tmp_path / "full"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(reader, bytes(4096))
    yield path
    os.close(reader)


async def test_it_serves_and_ends_though_nobody_reads_its_log(full_pipe: Path) -> None:
    redirect = f"2>'{full_pipe}'"
    async with serving("--store", "8MiB", redirect=redirect) as served:
        async with asynckv.connect(await served.until_serving()) as peer:
            await peer.store.put("key", torch.ones(3))
        served.signal()
        assert await served.ended() == 0


async def test_consumers_take_what_is_left_before_it_ends(forks: ForkServer) -> None:
    async with serving("--lookup", "8MiB", forks=forks) as served:
        async with asynckv.connect(await served.until_serving()) as peer:
            await peer.lookup.insert([1], None, torch.ones(3), None, None)
            served.signal()
            await served.until_logged("draining")
            entry = await peer.lookup.drop_select([1])
            assert entry.key is not None
            assert await served.ended() == 0


async def test_what_nobody_takes_keeps_it_for_as_long_as_it_may(
    forks: ForkServer,
) -> None:
    async with serving("--lookup", "8MiB", "--drain-s", "0.5", forks=forks) as served:
        async with asynckv.connect(await served.until_serving()) as peer:
            await peer.lookup.insert([1], None, torch.ones(3), None, None)
            assert 0.5 <= await seconds_to_end(served) < 2.5


async def test_a_file_the_environment_and_flags_are_taken_together(
    forks: ForkServer, config: Path
) -> None:
    options = ("--config", str(config), "--store", "3MiB")
    async with serving(
        *options, environ={"ASYNCKV_LOOKUP": "4MiB"}, forks=forks
    ) as served:
        http = await served.http_url()
        await served.until_serving()
        _, text = await http_get(f"{http}/metrics")
    assert re.search(r"\nasynckv_store_max_bytes 3.145728e\+06\n", text)
    assert re.search(r"\nasynckv_lookup_max_bytes 4.194304e\+06\n", text)


@pytest.fixture
def engines(authority: Authority) -> dict[str, TLS]:
    """Return certificates of two engines, issued where blocking is no harm."""
    return {name: authority.issue(name) for name in ("engine-a", "engine-b")}


@pytest.fixture
def keys_of_server(authority: Authority) -> tuple[str, ...]:
    """Return the options for the server's own certificate."""
    tls = authority.issue()
    return (
        "--certificate",
        f"{tls.certificate}",
        "--key",
        f"{tls.key}",
        "--ca",
        f"{tls.ca}",
    )


async def test_tenants_with_certificates_find_their_own_values_alone(
    forks: ForkServer, engines: dict[str, TLS], keys_of_server: tuple[str, ...]
) -> None:
    tenants = ("--tenant", "a=engine-a", "--tenant", "b=engine-b")
    listen = ("--listen", "tls://127.0.0.1:0", "--store", "8MiB")
    async with serving(*listen, *tenants, *keys_of_server, forks=forks) as served:
        url = await served.until_serving()
        async with asynckv.connect(url, tls=engines["engine-a"]) as peer:
            await peer.store.put("key", torch.ones(3))
            assert await peer.store.contains(["key"]) == (True,)
        async with asynckv.connect(url, tls=engines["engine-b"]) as peer:
            assert await peer.store.contains(["key"]) == (False,)


async def test_passwords_of_tiers_are_in_no_line(forks: ForkServer, path: Path) -> None:
    tier = f"stuck://user:hunter2@host{path}?how=task&call=touch&token=hunter2"
    async with serving(
        "--store", "8MiB", "--tier", tier, path=path, forks=forks
    ) as served:
        await served.until_serving()
        await seconds_to_end(served)
    assert "stuck://user:***@host" in "\n".join(served.log)
    assert "hunter2" not in "\n".join(served.log)


def test_a_deadline_that_is_kept_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = list[int]()
    monkeypatch.setattr("os._exit", ends.append)
    before = set(threading.enumerate())
    with EndDeadline(logging.NullHandler()) as deadline:
        deadline.set(60.0)
        deadline.set(30.0)
    for timer in set(threading.enumerate()) - before:
        timer.join()
    assert ends == []

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

import asynckv
from asynckv.cli.bench import server as child
from asynckv.cli.bench.baselines import MEETING_KEY, meeting_from
from asynckv.cli.bench.report import Settings
from asynckv.cli.bench.rig import open_rig
from asynckv.cli.bench.server import ServerEnded, own_child, own_server, serving
from asynckv.errors import PeerLost
from asynckv.testing.certificates import Authority


@pytest.fixture
def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is killed for not ending by itself: it is waited for."""
    monkeypatch.setattr(child, "_STOP_GRACE_S", 180.0)


@pytest.mark.timeout(180)
@pytest.mark.multiprocess
@pytest.mark.usefixtures("for_ever")
async def test_a_server_of_our_own_ends_with_the_bench() -> None:
    async with own_server(Settings(digest="off", lanes=1)) as url:
        await check_pings(url, Settings())
    with pytest.raises(PeerLost):
        async with open_rig(url, Settings()):
            pass


@pytest.mark.timeout(180)
@pytest.mark.multiprocess
async def test_a_server_that_cannot_serve_is_an_error() -> None:
    with pytest.raises(ServerEnded, match="status 1"):
        async with own_server(Settings(lanes=-1)):
            pass


async def test_who_is_let_in_learns_where_the_baselines_are() -> None:
    async with serving("tcp://127.0.0.1:0", Settings()) as url:
        async with asynckv.connect(url) as peer:
            found = await peer.store.get(MEETING_KEY)
    assert found is not None
    meeting = meeting_from(found)
    assert any(meeting.token)


async def test_beyond_this_host_it_asks_for_protection() -> None:
    with pytest.raises(asynckv.ConfigError):
        async with serving("tcp://0.0.0.0:0", Settings()):
            pass


async def check_pings(url: str, settings: Settings) -> None:
    """The raw baseline is where the bench says, and lets us in."""
    async with open_rig(url, settings) as rig:
        assert (await rig.in_thread(rig.baselines.raw.cpu_s)) > 0


async def test_a_bench_runs_over_tls(authority: Authority) -> None:
    settings = Settings(tls=authority.issue())
    async with serving("tls://127.0.0.1:0", settings) as url:
        await check_pings(url, settings)


async def test_who_does_not_know_the_secret_learns_no_token(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    settings = Settings(secret_file=str(secret))
    async with serving("tcp://127.0.0.1:0", settings) as url:
        await check_pings(url, settings)
        with pytest.raises(asynckv.AuthError):
            async with open_rig(url, Settings()):
                pass


async def test_over_a_unix_socket_the_baselines_are_on_loopback(tmp_path: Path) -> None:
    async with serving(f"unix://{tmp_path}/bench", Settings()) as url:
        await check_pings(url, Settings())


HEARS = """
import os, sys
print(os.getpid(), flush=True)
sys.stdin.read()
"""

DEAF = """
import os, time
print(os.getpid(), flush=True)
while True: time.sleep(60)
"""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("for_ever")
async def test_a_child_ends_when_it_is_hung_up_on() -> None:
    async with own_child("-c", HEARS) as line:
        pid = int(line)
        assert is_there(pid)
    assert not is_there(pid)


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
async def test_a_child_that_does_not_hear_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "_STOP_GRACE_S", 0.1)
    async with own_child("-c", DEAF) as line:
        pid = int(line)
    assert not is_there(pid)


@pytest.mark.multiprocess
@pytest.mark.timeout(180)
async def test_a_child_that_says_nothing_is_an_error() -> None:
    with pytest.raises(ServerEnded, match="status 7"):
        async with own_child("-c", "raise SystemExit(7)"):
            raise AssertionError

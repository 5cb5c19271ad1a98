from __future__ import annotations

import secrets
from pathlib import Path

import pytest

import asynckv
from asynckv.cli.bench.baselines import MEETING_KEY, meeting_from
from asynckv.cli.bench.rig import open_rig
from asynckv.cli.bench.server import serving
from asynckv.cli.bench.settings import Settings
from asynckv.testing.certificates import Authority


async def test_who_is_let_in_learns_where_the_baselines_are() -> None:
    async with serving("tcp://127.0.0.1:0", Settings()) as url:
        async with asynckv.connect(url) as peer:
            found = await peer.store.get(MEETING_KEY)
    assert found is not None
    meeting = meeting_from(found)
    assert meeting.raw_port != meeting.streams_port
    assert any(meeting.token)


async def test_beyond_this_host_it_asks_for_protection() -> None:
    with pytest.raises(asynckv.ConfigError):
        async with serving("tcp://0.0.0.0:0", Settings()):
            pass


async def test_a_bench_runs_over_tls(authority: Authority) -> None:
    settings = Settings(tls=authority.issue())
    async with serving("tls://127.0.0.1:0", settings) as url:
        async with open_rig(url, settings) as rig:
            assert len(await rig.in_thread(rig.raw.ping, 1)) == 1


async def test_who_does_not_know_the_secret_learns_no_token(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    settings = Settings(secret_file=str(secret))
    async with serving("tcp://127.0.0.1:0", settings) as url:
        async with open_rig(url, settings) as rig:
            assert len(await rig.in_thread(rig.raw.ping, 1)) == 1
        with pytest.raises(asynckv.AuthError):
            async with open_rig(url, Settings()):
                pass


async def test_over_a_unix_socket_the_baselines_are_on_loopback(tmp_path: Path) -> None:
    async with serving(f"unix://{tmp_path}/bench", Settings()) as url:
        async with open_rig(url, Settings()) as rig:
            assert len(await rig.in_thread(rig.raw.ping, 1)) == 1

from __future__ import annotations

import asyncio
import signal
import sys

import pytest
import torch

import asynckv
from asynckv.cli.serving import serve


def test_nothing_to_serve_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve() == 1
    assert "nothing to serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("listen", "store"),
    [
        ("nonsense", "8MiB"),
        ("tcp://127.0.0.1:0", "many"),
        ("tcp://0.0.0.0:0", "8MiB"),
    ],
)
def test_what_cannot_be_served_is_said(
    listen: str, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(listen=listen, store=store) == 1
    assert "asynckv serve: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.multiprocess
async def test_a_process_of_its_own_holds_what_others_put() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "asynckv",
        "serve",
        "--listen",
        "tcp://127.0.0.1:0",
        "--store",
        "8MiB",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        url = (await process.stdout.readline()).decode().strip()
        async with asynckv.connect(url, identity="engine") as peer:
            await peer.store.put("a", torch.ones(3))
            assert await peer.store.match_prefix(["a", "b"]) == 1
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        logged = (await process.stderr.read()).decode().splitlines()
        assert f"INFO {url}: engine connected, payload by " in logged[0]
        assert logged[-1].endswith(f"INFO {url}: engine left")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

"""What docs/security.md tells to do is done here, and works."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

import asynckv
from asynckv.errors import AuthError
from asynckv.security.tls import TLS
from asynckv.testing.pairs import open_peers

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shell commands of the page were run."""
    folder = tmp_path_factory.mktemp("as documented")
    for commands in snippets("sh"):
        subprocess.run(
            ["bash", "-euc", commands], cwd=folder, check=True, capture_output=True
        )
    return folder


def files_of(name: str, folder: Path) -> TLS:
    return TLS(
        certificate=folder / f"{name}.pem",
        key=folder / f"{name}.key",
        ca=folder / "ca.pem",
    )


async def test_the_secret_can_be_used(folder: Path) -> None:
    secret = folder / "kv.secret"
    async with (
        asynckv.LookupBuffer("1MiB", drain_s=0) as buffer,
        open_peers("tcp", buffer, secret_file=secret) as peers,
    ):
        assert await peers.consumer.lookup.peek([1]) == 0


async def test_the_certificates_can_be_used(folder: Path) -> None:
    prefill, decode = files_of("prefill-0", folder), files_of("decode-0", folder)
    prefill = dataclasses.replace(prefill, allowed_peers=("decode-0",))
    async with (
        asynckv.LookupBuffer("1MiB", drain_s=0) as buffer,
        asynckv.serve("tls://:0", lookup=buffer, tls=prefill) as server,
        asynckv.connect(server.url, tls=decode, identity="engine-7") as peer,
    ):
        await peer.lookup.insert([1], None, torch.ones(2), None, None)
        assert peer.identity.endswith("@prefill-0")
        assert [each.id for each in server.peers] == ["engine-7@decode-0"]
        with pytest.raises(AuthError):
            async with asynckv.connect(server.url, tls=prefill):
                pass


def test_the_python_makes_what_it_says(folder: Path) -> None:
    (code,) = snippets("python")
    names = {"buffer": asynckv.LookupBuffer("1MiB")}
    exec(code, names)  # noqa: S102 - our own page
    assert isinstance(names["server"], asynckv.Server)


def test_the_configuration_is_one() -> None:
    (text,) = snippets("json")
    config = asynckv.KVTransferConfig.from_json(json.dumps(json.loads(text)))
    assert config.url == "tls://prefill-0:14579"


def test_every_error_that_is_explained_is_raised_somewhere() -> None:
    sources = "".join(
        path.read_text() for path in Path(asynckv.__file__).parent.rglob("*.py")
    )
    sources = re.sub(r'"\s+f?"', "", sources)
    for row in re.findall(r"^\| `(?:Config|Auth)Error`: (.*?) \|", PAGE, re.MULTILINE):
        words = row.split(",")[0].replace("...", "").strip()
        assert words in sources, row

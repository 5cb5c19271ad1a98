"""A server that speaks S3, in a process of its own: moto's, with one bucket.

``python -m harness.moto_server PORT`` says where it is, and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest
from obstore.store import ObjectStore, S3Store

__all__ = (
    "BUCKET",
    "MotoServer",
    "moto",
    "obstore_has_its_threads",
    "s3",
)


BUCKET = "values"


class MotoServer:
    """The server as a test has it. It takes whatever credentials there are."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.moto_server", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self._process.stdout.close()
        made = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(made, timeout=10).close()

    @property
    def endpoint(self) -> str:
        """What goes into an URL of a tier."""
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str, bucket: str = BUCKET, **options: str) -> str:
        """Return the URL of a tier there."""
        told = {"endpoint": self.endpoint, "region": "us-east-1", "allow_http": "true"}
        told |= options
        return f"s3://{bucket}/{prefix}?{urllib.parse.urlencode(told)}"

    def bucket(self) -> ObjectStore:
        """Return what somebody else reads and writes its bucket with."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id="another",
            secret_access_key="another",
            client_options={"allow_http": True},
        )

    async def check_access(self, *, is_denied: bool) -> None:
        """From now on deny access to everybody, or to nobody."""
        path, body = "/moto-api/reset-auth", b"0" if is_denied else b"inf"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert answer.split()[1] == b"200", answer

    def freeze(self) -> None:
        """Let it do nothing until it is thawed."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it, whatever it is at."""
        self._process.kill()
        self._process.wait()


def _serve(port: int) -> None:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").disabled = True
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", port, app, threaded=True)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))


@pytest.fixture(scope="session")
def obstore_has_its_threads() -> None:
    """Descriptors of theirs stay until the interpreter ends."""
    from asynckv.stores.objects import ObjectTier  # no server has a use for torch

    async def use() -> None:
        async with ObjectTier.from_url("file:///nowhere/at/all") as tier:
            await tier.probe()

    asyncio.run(use())


@pytest.fixture(scope="session")
def moto(obstore_has_its_threads: None) -> Iterator[MotoServer | None]:
    """A server for all tests, which leave it as it was; there before each begins."""
    if importlib.util.find_spec("moto") is None:
        yield None
        return
    server = MotoServer()
    yield server
    server.kill()


@pytest.fixture
def s3(moto: MotoServer | None, monkeypatch: pytest.MonkeyPatch) -> MotoServer:
    """The same, with credentials in the environment."""
    if moto is None:
        pytest.skip('no S3 server here: pip install "moto[s3]" flask flask-cors')
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-told")
    return moto

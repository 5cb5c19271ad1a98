"""A server that speaks S3, in a process of its own: moto's, with one bucket.

``python -m harness.moto_server PORT`` says where it is, and serves until it is killed.
"""

from __future__ import annotations

import http.client
import logging
import signal
import subprocess
import sys
import urllib.parse

__all__ = ("BUCKET", "MotoServer")

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
        self.ask("PUT", f"/{BUCKET}")

    @property
    def endpoint(self) -> str:
        """What goes into an URL of a tier."""
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str, bucket: str = BUCKET, **options: object) -> str:
        """Return the URL of a tier there."""
        told = {"endpoint": self.endpoint, "region": "us-east-1", "allow_http": "true"}
        told |= {name: str(value) for name, value in options.items()}
        return f"s3://{bucket}/{prefix}?{urllib.parse.urlencode(told)}"

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Make a request that nobody signs.

        :raises RuntimeError: the answer is an error
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            found = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status}")
        return found

    def freeze(self) -> None:
        """Let it do nothing until it is thawed."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it, whatever it is at."""
        self._process.kill()
        self._process.communicate()


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

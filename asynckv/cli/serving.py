"""``asynckv serve``: buffers in a process of their own, for any number of engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from cyclopts import Parameter

from asynckv.cli.process import until_ended
from asynckv.errors import AsyncKVError, ConfigError
from asynckv.security.tls import TLS

__all__ = ("serve", "tls_of")

_LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


def serve(
    *,
    listen: str = "tcp://127.0.0.1:14579",
    lookup: str | None = None,
    store: str | None = None,
    fingerprint: str | None = None,
    secret_file: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    ca: Path | None = None,
    allow_plaintext: Annotated[bool, Parameter(negative=())] = False,
    log_level: _LogLevel = "info",
) -> int:
    """Serve a lookup buffer, a store, or both, until Ctrl-C.

    Prints the URL that peers connect to on standard output, one line, when they can.
    Logs on standard error which peers come, leave, are refused and are lost.

    Parameters
    ----------
    listen
        The address to serve at; port 0 takes a free one.
    lookup
        Serve a lookup buffer of at most so many bytes: 2GiB, 500MB. It or --store
        is needed.
    store
        Serve a store of at most so many bytes.
    fingerprint
        The model that the KV belongs to; peers of another one are refused.
    secret_file
        The secret that all peers share.
    certificate
        This side's certificate for ``tls://``, with --key and --ca.
    key
        The key of the certificate.
    ca
        The authorities that certify peers.
    allow_plaintext
        Allow ``tcp://`` beyond this host.
    log_level
        The least that is logged: debug, info, warning or error.
    """
    try:
        if lookup is None and store is None:
            raise ConfigError("nothing to serve", hint="--store 2GiB, --lookup 2GiB")
        tls = tls_of(certificate, key, ca)
        work = _serve(
            listen, lookup, store, fingerprint, secret_file, tls, allow_plaintext
        )
        with _logging_to_stderr(log_level):
            asyncio.run(until_ended(work))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0
    except (AsyncKVError, ValueError, OSError) as exc:
        print(f"asynckv serve: {exc}")
        return 1
    return 0


async def _serve(
    listen: str,
    lookup: str | None,
    store: str | None,
    fingerprint: str | None,
    secret_file: Path | None,
    tls: TLS | None,
    allow_plaintext: bool,
) -> None:
    import asynckv

    async with contextlib.AsyncExitStack() as stack:
        entries = values = None
        if lookup is not None:
            entries = asynckv.LookupBuffer(lookup, fingerprint=fingerprint)
            stack.callback(entries.abort)
        if store is not None:
            values = asynckv.StoreBuffer(store, fingerprint=fingerprint)
            stack.callback(values.abort)
        server = await stack.enter_async_context(
            asynckv.serve(
                listen,
                lookup=entries,
                store=values,
                secret_file=secret_file,
                tls=tls,
                allow_plaintext=allow_plaintext,
            )
        )
        print(server.url, flush=True)
        await asyncio.get_running_loop().create_future()


@contextlib.contextmanager
def _logging_to_stderr(level: _LogLevel) -> Iterator[None]:
    """Write what asynckv logs to standard error, a line each with its time."""
    logger, handler = logging.getLogger("asynckv"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def tls_of(certificate: Path | None, key: Path | None, ca: Path | None) -> TLS | None:
    """Return the certificates that three options name; ``None`` if none of them does.

    :raises ConfigError: only some of them are given
    """
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise ConfigError("--certificate, --key and --ca belong together")
    return TLS(certificate=certificate, key=key, ca=ca)

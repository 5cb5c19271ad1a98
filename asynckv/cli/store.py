"""``asynckv store``: look into a store that somebody serves, and take things out of it.

What needs torch is imported when it is used, so that ``--help`` is quick.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

from cyclopts import App, Parameter

from asynckv.cli.options import NO_KEY_OPTIONS, Fingerprint, KeyOptions, in_flags
from asynckv.cli.process import INTERRUPTED
from asynckv.errors import AsyncKVError
from asynckv.observability.lines import as_line, without_passwords
from asynckv.types import KVFingerprint

if TYPE_CHECKING:
    import torch

    from asynckv import Peer
    from asynckv.abc import StoredValue

__all__ = ("clear", "get", "rm", "stat", "store")

_T = TypeVar("_T")

store = App(name="store", help="Look into a store that is served.")

_Fingerprint: TypeAlias = Annotated[
    Fingerprint,
    Parameter(
        help="What the values were put with, exactly: a model's name, or JSON of a "
        "fingerprint. An engine of vLLM logs its own when it starts."
    ),
]


@store.command
def clear(
    url: str,
    /,
    *,
    fingerprint: _Fingerprint = None,
    keys: KeyOptions = NO_KEY_OPTIONS,
) -> int:
    """Delete all values put with exactly this fingerprint; say how many memory had.

    Without --fingerprint, those that were put without one. Tiers delete theirs behind
    it, as long as that takes; nobody finds them in this store meanwhile.

    Parameters
    ----------
    url
        Where the store is served.
    """

    def tell(count: int) -> int:
        whose = "without a fingerprint"
        if fingerprint is not None:
            whose = f"with exactly the fingerprint {as_line(fingerprint.as_text())}"
        print(f"all values put {whose} are deleted; memory had {count}")
        return 0

    return _run(url, fingerprint, keys, lambda peer: peer.store.clear(), tell)


@store.command
def get(
    url: str,
    key: str,
    /,
    *,
    out: Path | None = None,
    fingerprint: _Fingerprint = None,
    keys: KeyOptions = NO_KEY_OPTIONS,
) -> int:
    """Write the bytes of one value as they are in memory, and say what they are.

    The exit status is 1 if there is none.

    Parameters
    ----------
    url
        Where the store is served.
    key
        The name of the value.
    out
        The file that the bytes go to, instead of standard output.
    """

    def write(value: torch.Tensor | None) -> int:
        from asynckv.tensors.views import bytes_of

        if value is None:
            print(f"{as_line(key)} is not there", file=sys.stderr)
            return 1
        if out is None:
            sys.stdout.buffer.write(bytes_of(value))
        else:
            out.write_bytes(bytes_of(value))
        dtype = str(value.dtype).removeprefix("torch.")
        what = f"{dtype} {list(value.shape)}, {value.nbytes} bytes"
        print(f"{as_line(key)}: {what}", file=sys.stderr)
        return 0

    return _run(url, fingerprint, keys, lambda peer: peer.store.get(key), write)


@store.command
def rm(
    url: str,
    key: str,
    /,
    *more: str,
    fingerprint: _Fingerprint = None,
    keys: KeyOptions = NO_KEY_OPTIONS,
) -> int:
    """Delete values, and say of each whether it was there.

    The exit status is 1 if one was not.

    Parameters
    ----------
    url
        Where the store is served.
    key
        The name of the value.
    more
        Names of others.
    """
    names = (key, *more)

    async def delete(peer: Peer) -> Sequence[bool]:
        return [await peer.store.delete(name) for name in names]

    def tell(were_there: Sequence[bool]) -> int:
        for name, was_there in zip(names, were_there, strict=True):
            print(f"{as_line(name)}: {'deleted' if was_there else 'was not there'}")
        return 0 if all(were_there) else 1

    return _run(url, fingerprint, keys, delete, tell)


@store.command
def stat(
    url: str,
    /,
    *key: str,
    fingerprint: _Fingerprint = None,
    keys: KeyOptions = NO_KEY_OPTIONS,
) -> int:
    """Say what is stored under keys, and where; without one, who serves the store.

    That is no use of them. The exit status is 1 if one is not there.

    Parameters
    ----------
    url
        Where the store is served. What it counts is in its `/metrics`.
    key
        Names of values.
    """

    async def look(peer: Peer) -> Sequence[StoredValue | None]:
        if not key:
            await peer.store.contains(["stat"])  # is a store served there at all?
            print(f"{url} is {peer.identity}, which serves a store")
            print("what it counts is in its /metrics: asynckv serve --http")
        return [await peer.store.stat(name) for name in key]

    def tell(found: Sequence[StoredValue | None]) -> int:
        for name, value in zip(key, found, strict=True):
            print(f"{as_line(name)}: {_described(value)}")
        return 1 if None in found else 0

    return _run(url, fingerprint, keys, look, tell)


def _described(value: StoredValue | None) -> str:
    if value is None:
        return "is not there"
    said = [f"in {', '.join(map(as_line, value.tiers))}"]
    if value.spec is not None:
        spec = value.spec
        said += [f"{spec.dtype} {list(spec.shape)}", f"{spec.nbytes} bytes"]
    if value.ttl_s is not None:
        said.append(f"for {value.ttl_s:.0f} s more")
    if value.is_pinned:
        said.append("pinned")
    return "; ".join(said)


def _run(
    url: str,
    fingerprint: KVFingerprint | None,
    keys: KeyOptions,
    work: Callable[[Peer], Awaitable[_T]],
    done: Callable[[_T], int],
) -> int:
    """Do ``work`` with the server at ``url``; return what ``done`` makes of it."""

    async def connected() -> _T:
        async with keys.connect(url, fingerprint) as peer:
            return await work(peer)

    try:
        return done(asyncio.run(connected()))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (AsyncKVError, ValueError, OSError) as exc:
        print(f"asynckv store: {without_passwords(in_flags(exc))}", file=sys.stderr)
        return 1

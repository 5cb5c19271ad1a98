"""A store buffer that goes on below memory, on tiers that may fail; it never does."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import importlib.util
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Literal

import anyio

from asynckv.abc import StoreTier
from asynckv.buffers.statistics import StoreStatistics
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import ConfigError
from asynckv.links.sockets import in_thread
from asynckv.observability.lines import redacted
from asynckv.stores.client import closing
from asynckv.stores.health import TierStatistics
from asynckv.stores.tier_stack import FlushResult, TierStack
from asynckv.types import KVFingerprint, as_timeout

__all__ = ("TieredStatistics", "TieredStore", "open_tier")

_GROUP: Final = "asynckv.tiers"


_REDIS: Final = ("redis", "rediss", "redis+unix", "redis+cluster", "rediss+cluster")
_OBJECTS: Final = ("file", "s3")


def open_tier(url: str) -> StoreTier:
    """Return the tier of an URL, not opened yet, by its scheme.

    Schemes that are not asynckv's own are looked for among the entry points of the
    group ``asynckv.tiers``: functions that take the URL and return a
    :class:`~asynckv.abc.StoreTier`. That reads files: not for an event loop. A store
    that is opened does it in a thread.

    :raises ConfigError: nobody knows the scheme, or the URL says something wrong
    """
    try:
        scheme = urllib.parse.urlsplit(url).scheme
    except ValueError:  # its words may have the password
        raise ConfigError(f"{redacted(url)!r} is no URL") from None
    if scheme == "disk":
        from asynckv.stores.disk import DiskTier

        return DiskTier.from_url(url)
    if scheme in _REDIS:
        from asynckv.stores.redis import RedisTier

        return RedisTier.from_url(url)
    if scheme in _OBJECTS:
        if importlib.util.find_spec("obstore") is None:
            raise ConfigError(
                "obstore is not installed",
                hint='in a checkout of asynckv: python -m pip install ".[objects]"',
            )
        from asynckv.stores.objects import ObjectTier

        return ObjectTier.from_url(url)
    others = importlib.metadata.entry_points(group=_GROUP)
    for entry in others.select(name=scheme):
        made: StoreTier = entry.load()(url)
        return made
    if not scheme:
        raise ConfigError(
            f"{redacted(url)!r} is no URL",
            hint="write disk:///var/kv?max=100GiB, redis://host:6379 or s3://bucket",
        )
    known = ", ".join(sorted({"disk", *_REDIS, *_OBJECTS, *others.names}))
    raise ConfigError(f"no tier is called {scheme!r}", hint=f"there are: {known}")


@dataclasses.dataclass(frozen=True)
class TieredStatistics(StoreStatistics):
    """As of a store buffer, whose memory this is; and of each tier by its name.

    ``misses`` are what no tier had either; ``hits`` count what was in memory, or was
    fetched.
    """

    tiers: Mapping[str, TierStatistics]


class TieredStore(StoreBuffer):
    """A store buffer with ``tiers`` below its memory, the first one asked first.

    ``async with TieredStore("8GiB", ["disk:///var/kv?max=100GiB"]) as store``. A tier
    is an URL (see :func:`open_tier`) or a :class:`~asynckv.abc.StoreTier`.

    A put returns when memory has the value. Tiers are written to in the background,
    from a bounded queue that drops what it has no room for: :meth:`flush` says how
    much. What a tier has accepted, and not dropped since, is there after a restart; it
    need not be after a power loss. What memory has dropped is fetched from a tier
    by whoever asks for it: :meth:`get`, :meth:`pin`. Every value is verified then.

    ``put(pin=True)`` keeps a value in memory, for as long as that lives.

    A tier that fails, is slow, full or gone, is a tier that does not have things, and
    costs nobody more than its deadline, once.

    ``admit="second_use"`` writes to tiers what is used again after it was put.
    ``namespace`` keeps keys from those of others on the same tiers. That is no security
    boundary: who can read the tier can read all of it.

    :raises ConfigError: (on entering) a tier cannot be used as it was configured
    """

    def __init__(
        self,
        max_bytes: int | float | str,
        tiers: Sequence[str | StoreTier],
        *,
        admit: Literal["always", "second_use"] = "always",
        fingerprint: KVFingerprint | Mapping[str, str] | str | None = None,
        namespace: str = "",
        drain_s: float = 5.0,
    ) -> None:
        super().__init__(max_bytes, fingerprint=fingerprint)
        if admit not in ("always", "second_use"):
            raise ValueError(f'admit is "always" or "second_use", not {admit!r}')
        if isinstance(tiers, str) or not isinstance(tiers, Iterable):
            raise TypeError("tiers is a list of URLs and StoreTiers, also of one")
        self._tiers, self._drain_s = tuple(tiers), as_timeout(drain_s, "drain_s")
        for tier in self._tiers:
            if not isinstance(tier, str | StoreTier):
                raise TypeError(f"a tier is a URL or a StoreTier, not {tier!r:.40}")
        if not isinstance(namespace, str):
            raise TypeError(f"namespace is a str, not {namespace!r:.40}")
        if not namespace.isprintable():
            raise ValueError(f"{namespace!r} is no namespace: it has to be printable")
        self._opening = asyncio.Lock()
        self._lower = TierStack(
            *(self.values, self.pool),
            max_bytes=self._arena.max_bytes,
            admit=admit,
            namespace=namespace,
        )

    async def open(self) -> None:
        """Open memory and tiers. Entering does that. Again is nothing.

        A cancelled call, or one that fails, leaves a closed store; one that waits for
        another to open it changes nothing. A tier that does not answer is waited for 30
        seconds, and is used as soon as it does.

        :raises ConfigError: a tier cannot be used as it was configured
        :raises BufferClosed: it is closed, or was closed meanwhile
        """
        await super().open()
        async with self._opening:
            if self.values.lower is not None:
                return
            try:
                await self._lower.open(await in_thread(partial(_named, self._tiers)))
            except BaseException:
                self.abort()
                raise
            self.values.lower = self._lower

    async def flush(self) -> Mapping[str, FlushResult]:
        """Wait until tiers have what was put, or it is known that they have not.

        Returns how many puts so far each tier has accepted, dropped and failed. A
        cancelled call leaves no trace.
        """
        self._check_loop()
        return await self._lower.flush()

    def statistics(self) -> TieredStatistics:
        of_memory = vars(super().statistics())
        return TieredStatistics(**of_memory, tiers=self._lower.statistics())

    async def aclose(self) -> None:
        """Let tiers take what waits for them, for ``drain_s``; then close everything.

        Two seconds later at most it is closed, whatever a tier does.
        """
        self._check_loop()
        try:
            if not self.values.closed:
                async with asyncio.timeout(self._drain_s):
                    await self._lower.flush()
        except TimeoutError:
            pass
        finally:
            self.values.close()
            with anyio.CancelScope(shield=True):
                await self._lower.aclose()
                await super().aclose()

    def abort(self) -> None:
        self._lower.abort()
        for tier in self._tiers:
            if isinstance(tier, StoreTier):
                with closing(tier):  # which may be before it was opened
                    tier.abort()
        super().abort()


def _named(tiers: Sequence[str | StoreTier]) -> dict[str, StoreTier]:
    """Return tiers by what statistics call them."""
    named: dict[str, StoreTier] = {}
    for tier in tiers:
        if isinstance(tier, str):
            name, made = urllib.parse.urlsplit(tier).scheme, open_tier(tier)
        else:
            name, made = type(tier).__name__, tier
        while name in named or name == "memory":
            name += "'"
        named[name] = made
    return named

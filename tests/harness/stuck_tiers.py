"""Tiers of which one call never returns, opened by an URL as a package's would be.

``stuck://user:password@host/PATH?how=thread&call=store``: how it hangs, in which call.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import Any

from asynckv.abc import StoreTier
from asynckv.stores.disk import DiskTier
from asynckv.stores.disk.calls import FileCalls
from harness.tiers import DictTier

__all__ = ("add_stuck_tiers", "open_tier")


def add_stuck_tiers(path: Path) -> None:
    """Let who looks for packages in ``path`` find these tiers."""
    named = path / "stuck_tiers-1.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck-tiers\n")
    entry = f"[asynckv.tiers]\nstuck = {__name__}:open_tier\n"
    (named / "entry_points.txt").write_text(entry)


def open_tier(url: str) -> StoreTier:
    """Return a tier, of which a call prints ``stuck`` and does not return.

    ``how`` it hangs: in a ``thread`` that is no daemon, in a ``task`` that cannot be
    cancelled, or in a call of the system by a real ``disk`` tier.
    """
    parts = urllib.parse.urlsplit(url)
    options = dict(urllib.parse.parse_qsl(parts.query))
    how, call = options["how"], options["call"]
    if how == "disk":
        calls = FileCalls()
        setattr(calls, call, _hang_in_thread)
        return DiskTier(parts.path, 2**24, calls=calls)
    tier = DictTier()
    setattr(tier, call, {"thread": _hang_in_executor, "task": _hang_in_task}[how])
    return tier


def _hang_in_thread(*args: Any, **options: Any) -> Any:
    sys.stdout.write("stuck\n")
    sys.stdout.flush()
    threading.Event().wait()


async def _hang_in_executor(*args: Any) -> Any:
    await asyncio.to_thread(_hang_in_thread)


async def _hang_in_task(*args: Any) -> Any:
    sys.stdout.write("stuck\n")
    sys.stdout.flush()
    while True:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            continue

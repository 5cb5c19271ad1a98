"""``python -m harness.object_worker URL ...``: ends right after calls of a tier.

Twice for each URL: once it closes the tier before, once it forgets to. It says how each
process ended. Threads of obstore take their time to come back from the loop that they
have told of an answer: so the interpreter ends while they are there, unless it is kept
from that.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

from asynckv.abc.tiers import TierResult
from asynckv.stores.objects import ObjectTier
from asynckv.testing.tier_checks import SomeValue

__all__ = ()

_Ts = TypeVarTuple("_Ts")

_NBYTES = 5000
"""Little, or a thread that copies would keep the interpreter from its end, too."""


class _SlowToLeave(asyncio.SelectorEventLoop):
    """A loop that keeps other threads for a while."""

    def call_soon_threadsafe(
        self,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        threading.Event().wait(0.2)  # in a thread of obstore's
        return handle


async def _use(url: str, *, closes: bool) -> None:
    tier = ObjectTier.from_url(url)
    value, wanted = SomeValue("k1/a", _NBYTES, 1), SomeValue("k1/a", _NBYTES)
    await tier.probe()
    results = [*await tier.store([value.to_store()]), *await tier.fetch([wanted])]
    if results != [TierResult.DONE] * 2 or not wanted.is_one_of(1):
        raise AssertionError(results)
    if closes:
        await tier.aclose()


def _main(urls: list[str]) -> None:
    gc.freeze()  # else each of them looks through all that at its end, and copies it
    for url, closes in itertools.product(urls, (True, False)):
        if not (pid := os.fork()):
            with asyncio.Runner(loop_factory=_SlowToLeave) as runner:
                runner.run(_use(url, closes=closes))
            return  # and so ends as every interpreter does
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1:])

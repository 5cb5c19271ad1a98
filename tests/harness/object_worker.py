"""``python -m harness.object_worker URL``: ends twice, right after calls of a tier.

Once it closes the tier before, once it forgets to; it says how either ended. Threads of
obstore take their time to come back from the loop that they have told of an answer: so
the interpreter ends while they are there, unless it is kept from that.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from asynckv.abc.tiers import TierResult
from asynckv.stores.objects import ObjectTier
from asynckv.testing.tier_checks import SomeValue

__all__ = ()

_NBYTES = 5000
"""Little, or a thread that copies would keep the interpreter from its end, too."""


class _SlowToLeave(asyncio.SelectorEventLoop):
    """A loop that keeps other threads for a while."""

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(*args, **kwargs)
        time.sleep(0.2)  # noqa: TID251 - in a thread of obstore's
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


def _main(url: str) -> None:
    for closes in (True, False):
        if not (pid := os.fork()):
            with asyncio.Runner(loop_factory=_SlowToLeave) as runner:
                runner.run(_use(url, closes=closes))
            return  # and so ends as every interpreter does
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1])

"""What every pipe keeps, over any transport: small checks to run on yours.

Each check gets the two sides of a fresh pipe.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

from asynckv.abc import KVPipe
from asynckv.testing.pipe_checks.cancelling import CANCELLING_CHECKS
from asynckv.testing.pipe_checks.ending import ENDING_CHECKS
from asynckv.testing.pipe_checks.order import ORDER_CHECKS
from asynckv.testing.pipe_checks.tensors import TENSOR_CHECKS
from asynckv.testing.pipe_checks.values import PipeCheck

__all__ = ("PIPE_CHECKS", "MakePipePair", "check_pipe")

MakePipePair: TypeAlias = Callable[
    [], AbstractAsyncContextManager[tuple[KVPipe, KVPipe]]
]
"""Opens a pipe; both its sides have a ``max_bytes`` of 1 MiB."""

PIPE_CHECKS: Final[tuple[PipeCheck, ...]] = (
    *TENSOR_CHECKS,
    *ORDER_CHECKS,
    *ENDING_CHECKS,
    *CANCELLING_CHECKS,
)


async def check_pipe(make_pair: MakePipePair) -> None:
    """Run every check of :data:`PIPE_CHECKS`, each on a pipe of its own.

    :raises AssertionError: the pipe breaks the contract; a note names the check
    """
    for check in PIPE_CHECKS:
        try:
            async with make_pair() as (near, far):
                await check(near, far)
        except Exception as exc:
            exc.add_note(f"in {getattr(check, '__name__', check)}")
            raise

"""What every payload transport keeps: checks to run on yours.

Make it of :class:`~asynckv.abc.PayloadTransport`, say how two of them are
connected, and let the checks loose on the pair::

    @contextlib.asynccontextmanager
    async def open_pair(near_lost, far_lost, *, digest):
        loop = asyncio.get_running_loop()
        near = MyTransport(2, digest, loop, near_lost)
        far = MyTransport(2, digest, loop, far_lost)
        one, other = my_side_channel()
        await near.open(far.describe(), one)
        await far.open(near.describe(), other)
        try:
            yield near, far
        finally:
            await near.aclose()
            await far.aclose()

    async def test_my_transport_keeps_the_contract() -> None:
        await check_transport(open_pair)

Run them on asyncio and on uvloop. They move some hundred MiB, cut them short at
many places, and take a few seconds.
"""

from __future__ import annotations

from typing import Final

from asynckv.testing.expectations import naming
from asynckv.testing.transport_checks.ending import ENDING_CHECKS, STOPPING_CHECKS
from asynckv.testing.transport_checks.moving import MOVING_CHECKS
from asynckv.testing.transport_checks.sides import MakeTransportPair, TransportCheck

__all__ = ("TRANSPORT_CHECKS", "check_transport")

TRANSPORT_CHECKS: Final[tuple[TransportCheck, ...]] = (
    *MOVING_CHECKS,
    *STOPPING_CHECKS,
    *ENDING_CHECKS,
)


async def check_transport(make_pair: MakeTransportPair) -> None:
    """Run every check of :data:`TRANSPORT_CHECKS`, each on pairs of its own.

    :raises AssertionError: the transport breaks the contract; a note names the
        check
    """
    for check in TRANSPORT_CHECKS:
        with naming(check):
            await check(make_pair)

from __future__ import annotations

from functools import partial

import pytest

from asynckv.testing.pairs import (
    TRANSPORT_KINDS,
    TransportKind,
    open_transport_pair,
)
from asynckv.testing.transport_checks.ending import ENDING_CHECKS, STOPPING_CHECKS
from asynckv.testing.transport_checks.sides import TransportCheck


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", TRANSPORT_KINDS)
@pytest.mark.parametrize(
    "check", [*ENDING_CHECKS, *STOPPING_CHECKS], ids=lambda check: check.__name__
)
async def test_a_transport_keeps(check: TransportCheck, kind: TransportKind) -> None:
    await check(partial(open_transport_pair, kind))

"""What holds for every buffer and pipe holds for those that are protected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynckv.testing.certificates import Authority
from asynckv.testing.lookup_checks.values import LookupCheck
from asynckv.testing.lookup_conformance import LOOKUP_CHECKS
from asynckv.testing.pairs import (
    Scheme,
    open_lookup_pair,
    open_pipe_pair,
    open_store_pair,
)
from asynckv.testing.pipe_checks import PIPE_CHECKS, PipeCheck
from asynckv.testing.store_checks import STORE_CHECKS, StoreCheck

pytestmark = pytest.mark.both_loops

Options = dict[str, Any]


def sometimes(checks: Any) -> list[Any]:
    """One in four runs each time, all of them in ``nox -s chaos``."""
    return [
        pytest.param(
            check,
            id=check.__name__,
            marks=[pytest.mark.chaos] if number % 4 else [],
        )
        for number, check in enumerate(checks)
    ]


@pytest.fixture
def options(authority: Authority, make_secret: Callable[..., Path]) -> Options:
    return {"tls": authority.issue(), "secret_file": make_secret(), "lanes": 2}


@pytest.mark.parametrize("check", sometimes(LOOKUP_CHECKS))
async def test_lookup_buffers_over_tls(check: LookupCheck, options: Options) -> None:
    async with open_lookup_pair("tls", **options) as trio:
        await check(*trio)


@pytest.mark.parametrize("check", sometimes(STORE_CHECKS))
async def test_store_buffers_over_tls(check: StoreCheck, options: Options) -> None:
    async with open_store_pair("tls", **options) as pair:
        await check(*pair)


@pytest.mark.parametrize("check", sometimes(PIPE_CHECKS))
async def test_pipes_over_tls(check: PipeCheck, options: Options) -> None:
    async with open_pipe_pair("tls", **options) as (near, far):
        await check(near, far)


@pytest.mark.chaos
@pytest.mark.parametrize("scheme", ["tcp", "unix", "mem"])
@pytest.mark.parametrize("check", LOOKUP_CHECKS[::4], ids=lambda each: each.__name__)
async def test_lookup_buffers_with_a_secret(
    scheme: Scheme, check: LookupCheck, make_secret: Callable[..., Path]
) -> None:
    async with open_lookup_pair(scheme, secret_file=make_secret()) as trio:
        await check(*trio)

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial

import pytest
import torch

from asynckv.abc import KVPipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing.pairs import SCHEMES, Scheme, open_pipe_pair
from asynckv.testing.pipe_checks import (
    CANCELLING_CHECKS,
    ENDING_CHECKS,
    LARGE,
    ORDER_CHECKS,
    PIPE_BYTES,
    PIPE_CHECKS,
    TENSOR_CHECKS,
    PipeCheck,
    check_pipe,
    receive_many,
    send_many,
)


async def test_what_send_many_sends_is_what_receive_many_expects() -> None:
    async with open_pipe_pair("mem") as (near, far):
        await send_many(near, PIPE_BYTES // LARGE)
        await receive_many(far, PIPE_BYTES // LARGE)


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "check",
    [*TENSOR_CHECKS, *ORDER_CHECKS, *ENDING_CHECKS, *CANCELLING_CHECKS],
    ids=lambda check: check.__name__,
)
async def test_a_pipe_keeps(check: PipeCheck, scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        await check(near, far)


pytestmark = pytest.mark.both_loops


class Squaring(Pipe):
    """Gives back something else than was sent."""

    async def recv_tensor(
        self, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        tensor = await super().recv_tensor(into)
        return None if tensor is None else tensor.flatten()


@contextlib.asynccontextmanager
async def broken_pair() -> AsyncIterator[tuple[KVPipe, KVPipe]]:
    async with open_pipe_pair("mem") as (near, far):
        far.__class__ = Squaring
        yield near, far


@pytest.mark.parametrize("check", PIPE_CHECKS, ids=lambda check: check.__name__)
async def test_the_side_that_accepted_keeps(check: PipeCheck) -> None:
    async with open_pipe_pair("unix") as (near, far):
        await check(far, near)


async def test_all_checks_run_as_one() -> None:
    await check_pipe(partial(open_pipe_pair, "mem"))


async def test_a_pipe_that_breaks_the_contract_is_found_and_the_check_named() -> None:
    with pytest.raises(AssertionError, match="expected a") as caught:
        await check_pipe(broken_pair)
    assert caught.value.__notes__ == ["in a_tensor_comes_back_as_it_was_sent"]


def test_every_check_has_a_name_and_says_what_it_is_for() -> None:
    names = [check.__name__ for check in PIPE_CHECKS]
    assert len(set(names)) == len(names) == 20
    assert all(check.__doc__ for check in PIPE_CHECKS)

from __future__ import annotations

from asynckv.testing.pipe_checks.values import (
    LARGE,
    PIPE_BYTES,
    receive_many,
    send_many,
)
from asynckv.testing.pipe_pairs import open_pipe_pair


async def test_what_send_many_sends_is_what_receive_many_expects() -> None:
    async with open_pipe_pair("mem") as (near, far):
        await send_many(near, PIPE_BYTES // LARGE)
        await receive_many(far, PIPE_BYTES // LARGE)

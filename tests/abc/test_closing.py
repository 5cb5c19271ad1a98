from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.abc.closing import Closable, async_with_only


async def test_leaving_it_closes_it() -> None:
    class Closed(Closable):
        closed = 0

        async def aclose(self) -> None:
            self.closed += 1

        def abort(self) -> None:
            raise NotImplementedError

    async with Closed() as closable:
        assert closable.closed == 0
    assert closable.closed == 1


async def test_what_was_entered_once_says_that_there_has_to_be_a_new_one() -> None:
    @async_with_only("counted() as count")
    async def counted() -> AsyncIterator[int]:
        yield 1

    counting = counted()
    async with counting:
        pass
    with pytest.raises(RuntimeError, match=r"a new one: async with counted\(\) as"):
        await counting.__aenter__()

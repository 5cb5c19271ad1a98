from __future__ import annotations

from asynckv.abc.closing import Closable


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

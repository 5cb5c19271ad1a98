from __future__ import annotations

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from harness.crashes.witness import watch_acknowledgements


async def test_each_acknowledgement_is_told_in_whose_name_it_counts(
    local: LookupBuffer,
) -> None:
    told = list[tuple[str, str]]()
    watch_acknowledgements(local, lambda *what: told.append(what))
    async with (
        serve("mem://", lookup=local) as server,
        connect(server.url, identity="c") as peer,
    ):
        await local.insert([1], None, None, None, None, entry_id="e1")
        async with peer.lookup.drop_select():
            assert not told
    assert told == [("e1", "c")]

from __future__ import annotations

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.links.dial import dial
from asynckv.protocol.frames import Accepted, Commit
from harness.link_pairs import name_of
from harness.raw_inserts import RawInsert


async def test_an_insert_written_by_hand_is_an_insert() -> None:
    async with (
        LookupBuffer("1MiB", drain_s=0) as local,
        serve("mem://", lookup=local) as server,
    ):
        link = await dial(server.url, identity=name_of("producer"))
        whole = RawInsert(link, inline=b"abc")
        assert await whole.last() == Accepted()
        await local.drop_select(entry_id="it")
        await link.aclose()


async def test_a_writer_written_by_hand_is_a_writer() -> None:
    async with (
        LookupBuffer("1MiB", drain_s=0) as local,
        serve("mem://", lookup=local) as server,
    ):
        link = await dial(server.url, identity=name_of("producer"))
        writer = RawInsert(link, 3, 2**17, streaming=True)
        await writer.granted()
        writer.push_inline(b"abc")
        await writer.push(1)
        writer.stream.send(Commit())
        assert local.statistics().used_bytes == 3 + 2**17
        link.abort()

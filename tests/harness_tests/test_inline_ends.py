from __future__ import annotations

from asynckv.protocol.wire import digest_of, encode_chunk_header
from harness.inline_ends import open_beside_a_socket, open_inline_ends


async def test_what_one_end_sends_the_other_receives() -> None:
    async with open_inline_ends(2) as (near, far):
        target = bytearray(3)
        landing = far.receive(1, 0, target)
        assert await near.send(1, 0, b"abc") == await landing == digest_of(b"abc")
        assert target == b"abc" and near.lost == far.lost == []


async def test_a_bare_socket_says_what_it_likes() -> None:
    async with open_beside_a_socket() as (end, peer):
        landing = end.receive(1, 0, bytearray(4))
        peer.sendall(encode_chunk_header(1, 0, 0, 4) + b"abcd")
        assert await landing == digest_of(b"abcd")

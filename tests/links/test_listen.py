from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asynckv.errors import ConfigError, PeerLost
from asynckv.links.dial import dial
from asynckv.links.ending import GRACE_S
from asynckv.links.link import Link
from asynckv.links.listen import LinkListener, listen
from asynckv.protocol.frames import Peek, Result
from asynckv.protocol.values import PeerIdentity
from asynckv.testing.blocked import until
from asynckv.testing.faults.hostile import open_hostile_peer
from harness.link_pairs import Hearer, ScriptedService, linked

pytestmark = pytest.mark.both_loops

ME = PeerIdentity("me", "1")
YOU = PeerIdentity("you", "1")


async def door(url: str = "tcp://:0") -> LinkListener:
    return await listen(url, identity=YOU, service_for=lambda link: ScriptedService())


@pytest.fixture
async def listener() -> AsyncIterator[LinkListener]:
    listener = await door()
    yield listener
    await listener.aclose()


async def test_port_0_takes_a_free_port(listener: LinkListener) -> None:
    assert not listener.url.endswith(":0")


async def test_a_name_in_memory_is_free_again_after_the_close() -> None:
    for _ in range(2):
        listener = await door("mem://same")
        with pytest.raises(ConfigError, match="already"):
            await door("mem://same")
        await listener.aclose()


async def test_listeners_without_a_name_get_different_ones() -> None:
    one, two = await door("mem://"), await door("mem://")
    assert one.url != two.url
    await one.aclose()
    await two.aclose()


async def test_the_socket_file_is_gone_after_the_close(tmp_path: Path) -> None:
    listener = await door(f"unix://{tmp_path}/a.sock")
    assert (tmp_path / "a.sock").exists()
    await listener.aclose()
    await listener.aclose()
    assert not (tmp_path / "a.sock").exists()


@pytest.mark.parametrize("incarnation", ["1", "2"])
async def test_a_second_link_of_a_peer_ends_the_first(
    incarnation: str, listener: LinkListener
) -> None:
    first = await dial(listener.url, identity=ME)
    second = await dial(listener.url, identity=PeerIdentity("me", incarnation))
    await first.wait_closed()
    await until(lambda: len(listener.links) == 1)
    hearer = Hearer()
    second.open_stream(hearer, Peek(has_key=True))
    assert await hearer.next() == (Result(0), b"")
    assert not first.is_open
    await second.aclose()


async def test_different_peers_keep_their_links(listener: LinkListener) -> None:
    links = [
        await dial(listener.url, identity=PeerIdentity(str(n), "1")) for n in range(5)
    ]
    await until(lambda: len(listener.links) == 5)
    for link in links:
        await link.aclose()
    await until(lambda: listener.links == ())


async def test_fifty_may_dial_at_once(listener: LinkListener) -> None:
    links = await asyncio.gather(
        *(dial(listener.url, identity=PeerIdentity(str(n), "1")) for n in range(50))
    )
    assert len(listener.links) == 50
    await asyncio.gather(*(link.aclose() for link in links))


async def test_who_comes_who_leaves_and_who_is_lost_is_a_line_of_the_log_each(
    caplog: pytest.LogCaptureFixture, listener: LinkListener
) -> None:
    caplog.set_level(logging.INFO)
    url = listener.url
    await (await dial(url, identity=ME)).aclose()
    await until(lambda: listener.links == ())
    (await dial(url, identity=ME)).abort()
    await until(lambda: listener.links == () and len(caplog.records) == 4)
    came, left, again, lost = (record.getMessage() for record in caplog.records)
    assert came == again == f"{url}: me connected, payload by inline"
    assert left == f"{url}: me left"
    assert lost.startswith(f"{url}: me is lost: ")


async def test_closing_the_listener_says_goodbye_to_all() -> None:
    async with linked() as pair:
        await pair.listener.aclose()
        await pair.near.wait_closed()
        assert pair.near.error is not None and pair.near.error.goodbye
        with pytest.raises(PeerLost):
            await dial(pair.listener.url, identity=ME)


async def test_a_released_link_outlives_its_listener() -> None:
    async with linked() as pair:
        pair.listener.release(pair.far)
        await pair.listener.aclose()
        hearer = Hearer()
        pair.near.open_stream(hearer, Peek(has_key=False))
        assert await hearer.next() == (Result(0), b"")
        pair.far.abort()


async def test_aborting_the_listener_ends_all_without_a_word() -> None:
    async with linked() as pair:
        pair.listener.abort()
        await pair.near.wait_closed()
        assert pair.near.error is not None and not pair.near.error.goodbye


async def test_a_cancelled_close_leaves_nothing_open() -> None:
    async with linked() as pair:
        pair.near._stream.pause_reading()
        closing = asyncio.create_task(pair.listener.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert not pair.far.is_open


async def test_a_link_that_nobody_will_serve_is_aborted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(link: Link) -> ScriptedService:
        raise RuntimeError("on purpose")

    listener = await listen("tcp://:0", identity=YOU, service_for=refuse)
    link = await dial(listener.url, identity=ME)
    await link.wait_closed()
    assert "on purpose" in caplog.text
    await listener.aclose()
    await link.aclose()


async def test_a_link_that_was_refused_is_closed_with_the_listener() -> None:
    listener = await door()
    async with open_hostile_peer(listener.url) as hostile:
        (link,) = listener.links
        await hostile.send(0, Peek(has_key=False))
        await until(lambda: not listener.links)
        await listener.aclose()
        async with asyncio.timeout(GRACE_S / 2):
            await link.wait_closed()

from __future__ import annotations

import asyncio
import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import asynckv
from asynckv import (
    KVTransferConfig,
    LookupBuffer,
    PeerLost,
    StoreBuffer,
    TensorSpec,
)

Managers = dict[str, Callable[[], Any]]


def of_a_lookup(lookup: asynckv.KVLookupBuffer) -> Managers:
    specs = {"key": TensorSpec((1,), "uint8")}
    return {
        "open_insert(...) as writer": lambda: lookup.open_insert([1], None, specs),
        "open_drop_select(...) as stream": lambda: lookup.open_drop_select([1]),
    }


def of_the_package() -> Managers:
    both = KVTransferConfig(kv_role="kv_producer", kv_port=0)
    meet = {"rank": 0, "size": 1, "host": "127.0.0.1", "port": 1}
    return {
        "connect(...) as peer": lambda: asynckv.connect("mem://a"),
        "serve(...) as server": lambda: asynckv.serve("mem://a", lookup=LookupBuffer()),
        "open(...) as node": lambda: asynckv.open(both),
        "open_pipe(...) as pipe": lambda: asynckv.open_pipe("mem://a"),
        "listen_pipe(...) as listener": lambda: asynckv.listen_pipe("mem://a"),
        "join_group(...) as group": lambda: asynckv.join_group(**meet),  # type: ignore[arg-type]
    }


async def check_misuse(managers: Managers) -> None:
    for entered_by, make in managers.items():
        words = re.escape(f"write: async with {entered_by}:")
        with pytest.raises(TypeError, match=f"not for 'await'; {words}"):
            await make()
        with pytest.raises(TypeError, match=f"not for 'with'; {words}"):
            with make():
                pass


async def test_what_async_with_enters_says_so_to_await_and_to_with() -> None:
    await check_misuse(of_the_package())


async def test_the_calls_of_buffers_say_so_here_and_at_a_peer() -> None:
    lookup, store = LookupBuffer("1MiB"), StoreBuffer("1MiB")
    async with (
        asynckv.serve("mem://misuse", lookup=lookup, store=store) as server,
        asynckv.connect(server.url) as peer,
    ):
        for one in (lookup, peer.lookup):
            await check_misuse(of_a_lookup(one))
        for values in (store, peer.store):
            pin = functools.partial(values.pin, ["a"])
            await check_misuse({"pin(...) as found": pin})


async def test_the_calls_of_a_node_say_so() -> None:
    config = KVTransferConfig(kv_role="kv_producer", kv_port=0)
    async with asynckv.open(config, drain_s=0) as node:
        managers = of_a_lookup(node.lookup)
        del managers["open_drop_select(...) as stream"]  # a consumer's
        await check_misuse(managers)


async def test_what_is_not_entered_yet_says_so_when_it_is_used() -> None:
    with pytest.raises(AttributeError, match=r"no 'send_tensor' before it is entered"):
        asynckv.open_pipe("mem://a").send_tensor  # type: ignore[attr-defined]  # noqa: B018


async def test_a_drop_select_says_so_to_with_alone() -> None:
    async with LookupBuffer("1MiB") as lookup:
        await lookup.insert([1], None, None, None, None)
        selecting = lookup.drop_select([1])
        words = re.escape("write: async with drop_select(...) as entry:")
        with pytest.raises(TypeError, match=f"not for 'with'; {words}"):
            with selecting:  # type: ignore[attr-defined]
                pass
        assert (await asyncio.wait_for(selecting, 5)).matched_tokens == 1


async def test_a_forgotten_await_of_a_drop_select_says_so_where_it_is_missed() -> None:
    async with LookupBuffer("1MiB") as lookup:
        await lookup.insert([1], None, None, None, None)
        selecting = lookup.drop_select([1])
        for name in ("key", "key_tensor", "matched_tokens"):
            words = f"no '{name}', its entry may: await it, or use async with"
            with pytest.raises(AttributeError, match=words):
                getattr(selecting, name)
        assert (await selecting).key is None


@pytest.mark.parametrize("kind", [LookupBuffer, StoreBuffer])
@pytest.mark.parametrize("max_bytes", [0, 1.5, "1.5", -1])
def test_a_buffer_of_no_whole_number_of_bytes_is_refused(
    kind: type[LookupBuffer | StoreBuffer], max_bytes: float | str
) -> None:
    with pytest.raises(ValueError, match=r"whole number of bytes|at least 1|is not a"):
        kind(max_bytes)


async def test_a_url_at_which_nobody_listens_ends_in_the_caller_s_own_line() -> None:
    url = "unix:///nobody/listens/here"
    config = KVTransferConfig(
        kv_role="kv_both",
        kv_port=0,
        kv_connector_extra_config={"peer_url": url, "store_timeout": 0.1},
    )
    for make in (
        lambda: asynckv.connect(url),
        lambda: asynckv.open_pipe(url),
        lambda: asynckv.open(config, drain_s=0),
    ):
        with pytest.raises(PeerLost, match="start the") as caught:
            async with make():
                pass
        shown = traceback.TracebackException.from_exception(caught.value)
        frames, error = list(shown.stack), shown.__cause__
        while error is not None:
            frames += error.stack
            error = error.__cause__
        assert {frame.filename for frame in frames} == {__file__}
        assert len(list(shown.format())) < 15

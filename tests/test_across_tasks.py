from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import pytest
import torch
from starlette.applications import Starlette

import asynckv
from asynckv.abc import InsertWriter, SelectStream
from asynckv.integrations.fastapi import lifespan
from asynckv.pipes.group import Group
from asynckv.testing import open_lookup_pair, use_across_tasks
from asynckv.testing.pairs import free_port, open_group

pytestmark = pytest.mark.both_loops

Manager: TypeAlias = AbstractAsyncContextManager[Any, Any]
URL = "tcp://127.0.0.1:0"
TOKENS = [1, 2, 3]
KEY = torch.arange(2.0**15)
SPECS = {"key": asynckv.TensorSpec((2**15,), "float32")}


def producer() -> Manager:
    config = asynckv.KVTransferConfig(kv_role="kv_producer", kv_port=0)
    return asynckv.open(config, drain_s=0)


def group_of_one() -> Manager:
    return asynckv.join_group(rank=0, size=1, host="127.0.0.1", port=free_port())


ALONE: dict[str, Callable[[], Manager]] = {
    "LookupBuffer": lambda: asynckv.LookupBuffer("1MiB"),
    "StoreBuffer": lambda: asynckv.StoreBuffer(max_bytes="1MiB"),
    "join_group": group_of_one,
    "lifespan": lambda: lifespan(serve=URL, drain_s=0)(Starlette()),
    "listen_pipe": lambda: asynckv.listen_pipe(URL),
    "open": producer,
    "serve": lambda: asynckv.serve(URL, lookup=asynckv.LookupBuffer("1MiB")),
}


@pytest.mark.parametrize("name", ALONE)
async def test_what_one_task_enters_another_may_leave(name: str) -> None:
    await use_across_tasks(ALONE[name]())


async def write(writer: InsertWriter) -> None:
    await writer.put("key", KEY)


async def read(stream: SelectStream) -> None:
    assert [torch.equal(tensor, KEY) async for _, tensor in stream] == [True]


async def keep(entry: asynckv.KVEntry) -> None:
    assert isinstance(entry.key, torch.Tensor)
    assert torch.equal(entry.key, KEY)


@pytest.mark.parametrize("where", ["local", "remote"])
async def test_an_entry_is_put_in_and_taken_out_by_any_task(where: str) -> None:
    async with open_lookup_pair("tcp") as (near, far, local):
        if where == "local":
            near = far = local
        for select in selects(far):
            await use_across_tasks(near.open_insert(TOKENS, None, SPECS), write)
            await use_across_tasks(*select)
        assert local.statistics().used_bytes == 0


def selects(
    buffer: asynckv.KVLookupBuffer,
) -> list[tuple[Manager, Callable[[Any], Awaitable[object]]]]:
    return [(buffer.drop_select(TOKENS), keep), (buffer.open_drop_select(TOKENS), read)]


async def test_a_peer_connects_in_one_task_and_leaves_in_another() -> None:
    async with (
        asynckv.LookupBuffer("1MiB") as buffer,
        asynckv.serve(URL, lookup=buffer) as server,
    ):
        await use_across_tasks(
            asynckv.connect(server.url), lambda peer: peer.lookup.peek(TOKENS)
        )


async def test_a_consumers_node_is_opened_in_one_task_and_left_in_another() -> None:
    async with producer() as node:
        port = int(node.url.rpartition(":")[2])
        config = asynckv.KVTransferConfig(kv_role="kv_consumer", kv_port=port)
        await use_across_tasks(
            asynckv.open(config), lambda node: node.lookup.peek(TOKENS)
        )


async def test_both_sides_of_a_pipe_are_opened_and_left_in_any_task() -> None:
    async with asynckv.listen_pipe(URL) as listener:

        async def use(near: asynckv.KVPipe) -> None:
            await near.send_tensor(KEY)
            await use_across_tasks(await listener.accept(), take)

        async def take(far: asynckv.KVPipe) -> None:
            tensor = await far.recv_tensor()
            assert tensor is not None
            assert torch.equal(tensor, KEY)

        await use_across_tasks(asynckv.open_pipe(listener.url), use)


async def test_a_group_is_joined_in_one_task_and_left_in_another() -> None:
    async def use(groups: tuple[Group, ...]) -> None:
        await asyncio.gather(*(group.barrier() for group in groups))

    await use_across_tasks(open_group(2), use)

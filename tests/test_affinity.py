from __future__ import annotations

import asyncio
import gc
import os

import pytest

from asynckv import affinity
from asynckv.affinity import LoopBound, ProcessBound, ThreadBound, watch_forks
from asynckv.devices.growth import Growth
from asynckv.errors import WrongLoop
from asynckv.types import TensorSpec
from harness.forks import ForkServer


async def check(thing: LoopBound) -> asyncio.AbstractEventLoop:
    return thing._check_loop()


@pytest.mark.both_loops
async def test_the_first_use_binds_to_the_running_loop() -> None:
    thing = LoopBound()
    assert await check(thing) is asyncio.get_running_loop()
    assert await check(thing) is asyncio.get_running_loop()


@pytest.mark.both_loops
def test_another_loop_is_refused() -> None:
    thing = LoopBound()
    asyncio.run(check(thing))
    with pytest.raises(WrongLoop, match="LoopBound belongs to another event loop"):
        asyncio.run(check(thing))


@pytest.mark.both_loops
async def test_another_thread_is_refused() -> None:
    thing = LoopBound()
    thing._check_loop()
    with pytest.raises(WrongLoop, match="no event loop is running"):
        await asyncio.to_thread(thing._check_loop)


@pytest.mark.both_loops
def test_without_a_loop_nothing_is_bound() -> None:
    thing = LoopBound()
    with pytest.raises(WrongLoop, match="no event loop is running"):
        thing._check_loop()
    asyncio.run(check(thing))


@pytest.mark.both_loops
async def test_two_objects_of_a_class_are_bound_each_for_itself() -> None:
    first, second = LoopBound(), LoopBound()
    first._check_loop()
    assert second._loop is None


async def check_if_bound(thing: LoopBound) -> None:
    thing._check_loop_if_bound()


@pytest.mark.both_loops
def test_what_may_come_before_a_loop_binds_nothing() -> None:
    thing = LoopBound()
    thing._check_loop_if_bound()
    asyncio.run(check_if_bound(thing))
    asyncio.run(check(thing))
    with pytest.raises(WrongLoop):
        thing._check_loop_if_bound()
    with pytest.raises(WrongLoop):
        asyncio.run(check_if_bound(thing))


@pytest.mark.both_loops
async def test_without_a_loop_things_belong_to_a_thread() -> None:
    thing = ThreadBound()
    await asyncio.to_thread(ThreadBound()._check_thread)
    thing._check_thread()
    thing._check_thread()
    with pytest.raises(WrongLoop, match="ThreadBound belongs to another thread"):
        await asyncio.to_thread(thing._check_thread)


FORK = """
import asyncio, os, sys, warnings
import torch
import asynckv

# Newer Pythons warn of what this is about: a fork beside other threads.
warnings.simplefilter("ignore", DeprecationWarning)

async def refused(*calls):
    for call in calls:
        try:
            await call()
        except asynckv.WrongLoop:
            continue
        print("not refused", call)

def child(peer, pipe, buffer, server):
    asyncio.set_event_loop(None)
    asyncio._set_running_loop(None)
    asyncio.new_event_loop().run_until_complete(
        refused(
            lambda: peer.lookup.peek([1]),
            lambda: peer.lookup.drop_select([1]),
            lambda: peer.store.get("name"),
            lambda: pipe.send_tensor(torch.ones(1)),
            lambda: pipe.recv_tensor(),
            lambda: buffer.insert([1], None, torch.ones(1), None, None),
            peer.aclose, pipe.aclose, buffer.aclose, server.aclose,
        )
    )
    for mine in (peer, pipe, buffer, server):
        mine.abort()

async def main():
    large = torch.ones(300_000)
    async with (
        asynckv.LookupBuffer("1GiB") as buffer,
        asynckv.StoreBuffer("1MiB") as store,
        asynckv.serve(sys.argv[1], lookup=buffer, store=store) as server,
        asynckv.listen_pipe("tcp://127.0.0.1:0") as listener,
        asynckv.connect(server.url) as peer,
        asynckv.open_pipe(listener.url) as pipe,
    ):
        far = await listener.accept()
        await peer.lookup.insert([1], None, large, None, None)
        await peer.lookup.drop_select([1])
        await pipe.send_tensor(large)
        await far.recv_tensor()
        waiting = asyncio.create_task(peer.lookup.drop_select([7]))
        await asyncio.sleep(0)
        if not (pid := os.fork()):
            try:
                child(peer, pipe, buffer, server)
                sys.stdout.flush()
            finally:
                os._exit(0)
        await asyncio.to_thread(os.waitpid, pid, 0)
        async with asyncio.timeout(10), asynckv.connect(server.url) as other:
            await other.lookup.insert([7], None, large, None, None)
            assert torch.equal((await waiting).key, large)
            await pipe.send_tensor(large)
            assert torch.equal(await far.recv_tensor(), large)
        await far.aclose()
    print("the parent went on")

asyncio.run(main())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_a_forked_child_can_use_nothing_and_harms_nothing(
    forks: ForkServer, scheme: str, tmp_path: object
) -> None:
    url = "tcp://127.0.0.1:0" if scheme == "tcp" else f"unix://{tmp_path}/a.sock"
    assert await forks.printed_by(FORK, url) == "the parent went on\n"


ABORTED = """
import asyncio, os, sys, threading, warnings
import torch
import asynckv

warnings.simplefilter("ignore", DeprecationWarning)

NUMBERS = torch.arange(400_000)

class Child:
    \"""Aborts all that it has a copy of, when it is told to.\"""

    def __init__(self, *copies):
        go_on, self.say = os.pipe()
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.read(go_on, 1)
            for copy in copies:
                copy.abort()
            for thread in set(threading.enumerate()) - {threading.current_thread()}:
                thread.join()
        except BaseException as exc:
            print("the child failed:", repr(exc))
            sys.stdout.flush()
        finally:
            os._exit(0)

    async def abort(self):
        os.write(self.say, b"!")
        await asyncio.to_thread(os.waitpid, self.pid, 0)

async def buffers():
    async with (
        asynckv.LookupBuffer("1GiB") as lookup,
        asynckv.StoreBuffer("1GiB") as store,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
        asynckv.connect(server.url) as peer,
    ):
        await lookup.insert([1], None, NUMBERS, None, None)
        waiting = asyncio.create_task(peer.lookup.drop_select([7]))
        await asyncio.sleep(0)
        await peer.store.put("name", NUMBERS)  # by then the other one waits there
        await Child(store, lookup).abort()
        yield await store.get("name")
        yield await peer.store.get("name")
        yield (await lookup.drop_select([1])).key
        await lookup.insert([7], None, NUMBERS, None, None)
        yield (await waiting).key

async def pipes():
    async with (
        asynckv.listen_pipe("tcp://127.0.0.1:0") as listener,
        asynckv.open_pipe(listener.url) as near,
        await listener.accept() as far,
    ):
        async def received():
            await near.send_tensor(NUMBERS)
            return await far.recv_tensor()

        while near.transport != sys.argv[2]:
            await received()
        await received()
        child = Child(near, far, listener)
        tensors = [await received() for _ in range(3)]
        await near.send_tensor(NUMBERS)
        await child.abort()
        tensors += [await far.recv_tensor(), await received()]
        for tensor in tensors:
            yield tensor

async def main():
    async with asyncio.timeout(20):
        async for tensor in {"buffers": buffers, "pipes": pipes}[sys.argv[1]]():
            assert torch.equal(tensor, NUMBERS), tensor
    print("nothing was touched")

asyncio.run(main())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", [("buffers",), ("pipes", "map")])
async def test_what_a_forked_child_aborts_stays_as_it_is_in_the_parent(
    forks: ForkServer, what: tuple[str, ...]
) -> None:
    assert await forks.printed_by(ABORTED, *what) == "nothing was touched\n"


def test_what_was_made_here_is_no_copy() -> None:
    mine = ProcessBound()
    assert mine._is_copy
    mine._own()
    assert not mine._is_copy


_MIB = 2**20


class Owner:
    def __init__(self) -> None:
        self.kept = 0

    def keep_for_child(self) -> None:
        self.kept += 1


def _fork() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def test_each_owner_is_told_before_every_fork() -> None:
    owners = [Owner(), Owner()]
    for owner in owners:
        watch_forks(owner)
    _fork()
    _fork()
    assert [owner.kept for owner in owners] == [2, 2]


def test_an_owner_is_not_kept_alive() -> None:
    watch_forks(Owner())
    gc.collect()
    assert not [o for o in affinity._owners().values() if isinstance(o, Owner)]
    _fork()


async def test_memory_that_a_forked_child_sees_is_not_used_again() -> None:
    growth, spec = Growth(64 * _MIB), TensorSpec((40 * _MIB,), "uint8")
    await growth.reach(60 * _MIB)
    tensor = growth.spares.spare(spec).fill_(3)
    go_on, say = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(go_on, 1)
        os._exit(int(tensor[-1]))  # no torch operation that would need threads
    del tensor
    growth.spares.spare(TensorSpec((60 * _MIB,), "uint8")).fill_(4)
    growth.spares.spare(spec).fill_(4)
    os.write(say, b"!")
    assert _exit_code(pid) == 3
    for end in (go_on, say):
        os.close(end)
    await growth.aclose()


def _exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

from __future__ import annotations

import gc
import os

from asynckv import processes as forking
from asynckv.devices.growth import Growth
from asynckv.processes import watch_forks
from asynckv.types import TensorSpec

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
    assert not [o for o in forking._owners().values() if isinstance(o, Owner)]
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

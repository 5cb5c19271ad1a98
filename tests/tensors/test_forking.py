from __future__ import annotations

import gc
import os

from asynckv.tensors import forking
from asynckv.tensors.forking import watch_forks


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

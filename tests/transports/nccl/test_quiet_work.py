from __future__ import annotations

import pytest

from asynckv.tensors.quiet_gpus import QuietGpu
from asynckv.transports.nccl import worker
from asynckv.transports.nccl.worker import QuietWork


class Work:
    def __init__(self) -> None:
        self.gpu = QuietGpu()
        self.done = list[str]()
        self.work = QuietWork(self.gpu)

    def add(self, name: str) -> None:
        self.work.add(lambda: self.done.append(name))
        self.work.run()


def test_commands_are_done_in_order_when_no_operation_is_left() -> None:
    quiet = Work()
    quiet.work.begin_operation()
    quiet.add("first")
    quiet.add("second")
    assert quiet.done == []
    quiet.work.end_operation()
    quiet.work.run()
    assert quiet.done == ["first", "second"]


def test_a_command_that_has_waited_long_is_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "PATIENCE_S", 0.0)
    quiet = Work()
    quiet.work.begin_operation()
    quiet.add("late")
    assert quiet.done == ["late"]
    quiet.work.end_operation()


def test_others_of_the_process_wait_for_its_operations() -> None:
    quiet, seen = Work(), list[int]()
    quiet.work.begin_operation()
    with quiet.gpu.allocating(0):
        seen.append(quiet.gpu._allocating)
    quiet.work.end_operation()
    with quiet.gpu.allocating(0):
        seen.append(quiet.gpu._allocating)
    assert seen == [0, 1]

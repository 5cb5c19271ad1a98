from __future__ import annotations

import gc

from harness.fake_gpus import FakeGpus
from harness.fake_gpus.communicators import FakeComm
from harness.fake_gpus.wires import Meetings


def comm_of(gpus: FakeGpus) -> FakeComm:
    meetings = Meetings(by_sockets=False)
    wire = meetings.join(meetings.unique_id(), 0)
    return FakeComm(gpus.process().nccl, wire, 0)


def test_a_communicator_that_is_left_to_the_collector_is_a_fault() -> None:
    gpus = FakeGpus(2)
    comm_of(gpus)
    gc.collect()
    assert gpus.faults == ["a communicator was left to the collector"]


def test_one_that_was_aborted_or_destroyed_is_none() -> None:
    gpus = FakeGpus(2)
    comm_of(gpus).abort()
    comm_of(gpus).destroy()
    gc.collect()
    assert not gpus.faults

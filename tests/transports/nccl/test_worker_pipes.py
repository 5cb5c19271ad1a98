from __future__ import annotations

import pytest

from asynckv.errors import GPUFailed
from asynckv.transports.nccl.worker_pipes import WorkerPipe
from harness.fake_gpus import FakeGpus


def pipe_of(gpus: FakeGpus, lost: list[Exception]) -> WorkerPipe:
    process = gpus.process()
    return WorkerPipe(
        process.cuda, process.nccl, "send", opened=lambda: None, lost=lost.append
    )


def test_an_end_is_told_once(gpus: FakeGpus) -> None:
    lost: list[Exception] = []
    pipe = pipe_of(gpus, lost)
    for number in range(2):
        pipe.lost(GPUFailed(str(number)))
    assert [str(error) for error in lost] == ["0"]


def test_what_is_not_open_posts_nothing(gpus: FakeGpus) -> None:
    pipe = pipe_of(gpus, [])
    for use in (lambda: pipe.post(0, 1), lambda: pipe.stream):
        with pytest.raises(GPUFailed, match="not open"):
            use()
    assert pipe.async_error() is None


def test_what_is_not_open_ends_without_a_word(gpus: FakeGpus) -> None:
    pipe = pipe_of(gpus, [])
    assert pipe.end_comm(is_aborted=True) is pipe.end_comm(is_aborted=False) is None
    pipe.release()
    assert pipe.mark_if_possible() is None
    assert "<send pipe>" in repr(pipe)

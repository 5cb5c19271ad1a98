from __future__ import annotations

import pytest

from asynckv.errors import GPUFailed
from harness.fake_gpus import FakeProcess
from harness.fake_gpus.gates import Gate


def test_what_is_behind_a_gate_waits_until_it_is_opened(near: FakeProcess) -> None:
    gate, stream, event = Gate(), near.cuda.stream(), near.cuda.event()
    stream.add(gate)
    event.record(stream)
    assert not event.query()
    gate.open()
    assert event.query()


def test_what_is_behind_a_gate_that_fails_fails_too(near: FakeProcess) -> None:
    gate, stream, event = Gate(), near.cuda.stream(), near.cuda.event()
    stream.add(gate)
    event.record(stream)
    gate.fail(GPUFailed("no", code=700))
    with pytest.raises(GPUFailed):
        event.query()

from __future__ import annotations

import pytest

from asynckv.protocol.transfer_frames import DeviceReady, DevicesFinish
from asynckv.testing.blocked import until
from harness.nccl_pairs import loop_channels, open_nccl_pair


async def test_a_channel_hands_on_what_came_before_it_was_attached_to() -> None:
    near, far = loop_channels()
    heard: list[object] = []
    near.send(DeviceReady())
    far.attach(heard.append, lambda error: None)
    near.send(DevicesFinish())
    await until(lambda: len(heard) == 2)
    assert heard == near.said


async def test_a_channel_keeps_back_what_it_is_told_to() -> None:
    near, far = loop_channels()
    heard: list[object] = []
    far.holds = True
    far.attach(heard.append, lambda error: None)
    near.send(DeviceReady())
    far.holds = False
    far.pass_on()
    assert heard == [DeviceReady()]


async def test_a_pair_tells_of_what_real_gpus_punish() -> None:
    with pytest.raises(AssertionError, match="a fault of the test"):
        async with open_nccl_pair(lambda _: None, lambda _: None) as (near, _):
            near.inner._worker.cuda._gpus.note("a fault of the test")  # type: ignore[attr-defined]

from __future__ import annotations

from asynckv.protocol.transfer_frames import DeviceFrame, OpenDevices
from harness.fuzzing.gpu_scene import record_gpus


async def test_every_frame_between_gpus_is_said() -> None:
    recording = await record_gpus()
    said = {type(frame) for frame, _ in recording.frames()}
    assert {OpenDevices, *DeviceFrame.__args__} <= said

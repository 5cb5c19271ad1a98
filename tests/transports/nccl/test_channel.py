from __future__ import annotations

from asynckv.transports.nccl.transport import DeviceChannel
from harness.nccl_pairs import loop_channels


async def test_channels_of_the_testing_kit_are_channels() -> None:
    near, far = loop_channels()
    assert isinstance(near, DeviceChannel) and isinstance(far, DeviceChannel)
    assert not isinstance(object(), DeviceChannel)

from __future__ import annotations

import asyncio

from asynckv.transports.nccl.transport import NcclSettings, make_ends
from asynckv.transports.nccl.worker import DeviceWorker
from harness.nccl_pairs import loop_channels


async def test_the_smaller_chunk_of_both_sides_counts(worker: DeviceWorker) -> None:
    settings = NcclSettings(chunk_bytes=64)
    for theirs, agreed in ((16, 16), (128, 64)):
        sender, receiver = make_ends(
            worker,
            asyncio.get_running_loop(),
            loop_channels()[0],
            settings,
            peer_chunk_bytes=theirs,
            settled=lambda: None,
        )
        assert sender.chunk_bytes == agreed
        assert not (sender or receiver or sender.is_busy or receiver.is_busy)

from __future__ import annotations

import pytest
import torch

import asynckv
from asynckv.cli.bench.device_server import TOKENS, content_of
from asynckv.cli.bench.server import own_child
from asynckv.testing.expectations import is_same
from harness.gpu_processes import BEGIN

CODE = """
from asynckv.cli.bench.device_server import serve_gpu
asyncio.run(serve_gpu(open_device(), 2**20, 4))
"""


def test_every_byte_of_an_entry_has_its_value() -> None:
    assert content_of(258).tolist() == [*range(256), 0, 1]


@pytest.mark.multiprocess
@pytest.mark.chaos
async def test_entries_are_there_again_whenever_they_were_taken() -> None:
    async with own_child("-c", BEGIN + CODE, "fake") as line:
        for url, nbytes in zip(line.split(), (2**20, 2**18), strict=True):
            async with asynckv.connect(url) as peer:
                for _ in range(3):
                    entry = await peer.lookup.drop_select(TOKENS)
                    assert isinstance(entry.key, torch.Tensor)
                    assert is_same(entry.key, content_of(nbytes))

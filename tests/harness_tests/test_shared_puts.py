from __future__ import annotations

from typing import Any

import pytest

from asynckv.links.fd_socket import has_fd_sockets
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.fake_devices import faultless_gpus
from harness.gpu_pairs import open_gpu_pair

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


async def test_what_was_read_counts() -> None:
    with faultless_gpus() as gpus:
        async with open_gpu_pair(gpus) as pair:
            assert pair.puts.are_read and not pair.puts.has_shown
            key = pair.theirs.tensor(noise(MIB))
            await pair.peer.lookup.insert([1], None, key, None, None)
            assert pair.puts.has_shown
            await pair.buffer.drop_select([1])
            await pair.emptied()


@pytest.mark.parametrize("device", [True, False])
async def test_nobody_reads_what_is_not_shown(device: bool) -> None:
    options: dict[str, Any] = {} if device else {"device": None}
    with faultless_gpus() as gpus:
        async with open_gpu_pair(gpus, url="?payload=inline", **options) as pair:
            assert not pair.puts.are_read and not pair.puts.staged_bytes
            with pytest.raises(LookupError):
                assert pair.puts.has_shown

"""What a peer shows, and what cannot be read there, comes by the link."""

from __future__ import annotations

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.tensors.shared_file import MappedFile

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here")

MIB = 2**20


def refuse(file: MappedFile) -> MappedFile:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("is_borrowed", [False, True])
async def test_memory_that_cannot_be_mapped_again_is_received(
    local: LookupBuffer, monkeypatch: pytest.MonkeyPatch, is_borrowed: bool
) -> None:
    tensor = torch.full((MIB,), 3.0)
    await local.insert([1], None, tensor, None, None)
    async with serve("tcp://127.0.0.1:0", lookup=local) as server:
        async with connect(f"{server.url}?payload=map") as peer:
            assert peer.transport == "map"
            monkeypatch.setattr(MappedFile, "claim", lambda file, places: None)
            monkeypatch.setattr(MappedFile, "again", refuse)
            if is_borrowed:
                async with peer.lookup.drop_select([1]) as entry:
                    assert entry.key_tensor.equal(tensor)
            else:
                into = torch.zeros_like(tensor)
                entry = await peer.lookup.drop_select([1], into={"key": into})
                assert into.equal(tensor) and entry.attempt == 1
    assert local.statistics().acknowledged == 1

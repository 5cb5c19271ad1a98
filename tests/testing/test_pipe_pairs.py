from __future__ import annotations

import socket

import pytest
import torch

from asynckv.testing.pairs import SCHEMES, Scheme
from asynckv.testing.pipe_checks.values import PIPE_BYTES
from asynckv.testing.pipe_pairs import free_port, open_group, open_pipe_pair


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_sides_of_a_pair_are_connected(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        await near.send_tensor(torch.ones(2))
        found = await far.recv_tensor()
        assert found is not None
        assert torch.equal(found, torch.ones(2))
        assert near.statistics().max_bytes == far.statistics().max_bytes == PIPE_BYTES


def test_a_free_port_can_be_listened_at() -> None:
    socket.create_server(("127.0.0.1", free_port())).close()


async def test_the_ranks_of_a_group_come_in_order() -> None:
    async with open_group(3) as groups:
        assert [group.rank for group in groups] == [0, 1, 2]

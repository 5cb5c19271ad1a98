from __future__ import annotations

import pytest

from asynckv.cli.bench.rig import open_rig
from asynckv.cli.bench.server import ServerEnded, own_server
from asynckv.cli.bench.settings import Settings
from asynckv.errors import PeerLost

# On a busy machine most of a process's time goes into its imports.
pytestmark = pytest.mark.timeout(180)


@pytest.mark.multiprocess
async def test_a_server_of_our_own_ends_with_the_bench() -> None:
    async with own_server(Settings(digest="off", lanes=1)) as url:
        async with open_rig(url, Settings()) as rig:
            assert len(await rig.in_thread(rig.raw.ping, 1)) == 1
    with pytest.raises(PeerLost):
        async with open_rig(url, Settings()):
            pass


@pytest.mark.multiprocess
async def test_a_server_that_cannot_serve_is_an_error() -> None:
    with pytest.raises(ServerEnded, match="status 1"):
        async with own_server(Settings(lanes=-1)):
            pass

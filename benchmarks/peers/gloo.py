"""torch.distributed with gloo: send and receive of tensors, which block."""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import Work

__all__ = ("Gloo",)

_MESSAGE_NBYTES = 16 * 2**20
_TIMEOUT = datetime.timedelta(minutes=10)


class Gloo(Peer):
    """Two ranks; a tensor for each layer, received into place."""

    how = "send and recv in a thread, one tensor a layer, blocks joined"
    environ: ClassVar[Mapping[str, str]] = {"GLOO_SOCKET_IFNAME": "lo"}
    _is_source = False

    async def serve(self) -> str:
        self._is_source = True
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        # It blocks until it is told to stop, and is not waited for if it never is.
        threading.Thread(target=self._answer, args=(url,), daemon=True).start()
        return url

    async def connect(self, address: str) -> None:
        await self.in_thread(_join, address, 1)

    async def pull(self, work: Work) -> None:
        await self.in_thread(self._pull, work)

    async def aclose(self) -> None:
        if not self._is_source:
            nothing = Work("", "", 0, 1, 1)
            await self.in_thread(torch.distributed.send, _request(nothing), 0)
            torch.distributed.destroy_process_group()
        await super().aclose()

    def _pull(self, work: Work) -> None:
        torch.distributed.send(_request(work), 0)
        for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
            landing = piece.landing()
            torch.distributed.recv(torch.from_numpy(landing), 0)
            piece.land(landing)

    def _answer(self, url: str) -> None:
        _join(url, 0)
        request = _request(Work("", "", 0, 1, 1))
        while True:
            torch.distributed.recv(request, 1)
            work = Work.decode(request.numpy().tobytes())
            if not work.parts:
                break
            for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
                torch.distributed.send(torch.from_numpy(piece.gather()), 1)


def _join(url: str, rank: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=url, rank=rank, world_size=2, timeout=_TIMEOUT
    )


def _request(work: Work) -> torch.Tensor:
    return torch.frombuffer(bytearray(work.encode()), dtype=torch.uint8)

"""Where the calls of connectors are cancelled: prefill, decode, and what is between."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch

from asynckv.abc import KVConnectorWorker
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine, prompt_digest
from asynckv.connectors.options import Direction
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import LoadRequest, P2PMetadata, SaveRequest
from asynckv.parallel.shapes import EngineShape
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect
from harness.cancellations.grounds import Watched, everything_is_quiet, tasks_now
from harness.cancellations.sweeper import ticks
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import free_urls, pair_configs, toy_shape
from harness.engines.toy_rank import ToyRank
from harness.fake_devices import (
    FakeDevice,
    fake_device_of,
    faultless_gpus,
    lanes_of,
)

__all__ = (
    "LARGE",
    "SMALL",
    "P2PGround",
    "Scheme",
    "Side",
    "ToyCaches",
    "expect_quiet",
    "has_let_go",
    "open_p2p",
    "until_loaded",
    "until_saved",
    "urls_of",
)

Scheme: TypeAlias = Literal["mem", "tcp", "unix"]

SMALL: Final = ToyModel(layers=2, head_dim=4)
"""Its layers are copied at once, and ride in a frame."""
LARGE: Final = ToyModel(layers=2, head_dim=96)
"""Its layers are copied in threads, and go over the lanes."""

_TIMEOUT_S: Final = 20.0
_LATE: Final = 5
_BLOCKS: Final = 8
_SPOILT: Final = 0x5A5A5A5A
_PLACES: Final = ((5, 2, 7), (1, 6, 3))
_names: Final = itertools.count()
_FOLDER: Final = Path(tempfile.gettempdir())


class ToyCaches:
    """The toy engine's, of so few blocks that all of it is looked at each time.

    The prompt is always the same. ``place`` says in which blocks it is.
    """

    def __init__(
        self,
        model: ToyModel,
        shape: EngineShape,
        rank: int,
        place: int,
        gpu: FakeDevice | None = None,
    ) -> None:
        self.block_ids = _PLACES[place]
        self.tokens = tuple(range(1000, 1000 + len(self.block_ids) * shape.block_size))
        self._rank = ToyRank(model, shape, rank, _BLOCKS, gpu)
        self.layers = self._rank.caches
        for layer in self.layers:
            self._rank.write(layer, self.block_ids, self.tokens, 0)
        self._expected = {layer: self._read(layer) for layer in self.layers}
        self._computed = {layer: each.cpu() for layer, each in self.layers.items()}
        if gpu is None:
            self._computed = {layer: one.clone() for layer, one in self.layers.items()}
        self.spoil()

    @property
    def prompt_nbytes(self) -> int:
        """How much the prompt's blocks are, in all layers."""
        whole = sum(cache.nbytes for cache in self.layers.values())
        return whole * len(self.block_ids) // _BLOCKS

    def compute(self) -> None:
        """The prompt's KV is in its blocks."""
        for layer, cache in self.layers.items():
            cache.copy_(self._computed[layer])

    def spoil(self) -> None:
        """Its blocks are somebody else's now, as are all others."""
        for cache in self.layers.values():
            cache.fill_(_SPOILT)

    def expect_computed(self) -> None:
        """:raises AssertionError: a byte of the prompt's KV is not what it should be"""
        for layer, expected in self._expected.items():
            expect(torch.equal(self._read(layer), expected), f"{layer} is wrong")

    def expect_spoilt(self) -> None:
        """:raises AssertionError: somebody wrote here after they were done"""
        for layer, cache in self.layers.items():
            expect(bool((cache == _SPOILT).all()), f"{layer} was written to")

    def _read(self, layer: str) -> torch.Tensor:
        return self._rank.read(layer, self.block_ids, len(self.tokens)).clone()


async def expect_quiet(caches: ToyCaches) -> None:
    """Overwrite the blocks, and wait for a while.

    :raises AssertionError: somebody writes there still
    """
    caches.spoil()
    await ticks(_LATE)
    caches.expect_spoilt()


@dataclasses.dataclass(frozen=True)
class Side:
    """One engine: a worker and its caches for each rank, on ``gpu`` if there is one."""

    engine_id: str
    config: KVTransferConfig
    workers: tuple[P2PWorker, ...]
    caches: tuple[ToyCaches, ...]
    gpu: FakeDevice | None = None

    def new_worker(self, config: KVTransferConfig, engine: KVEngine) -> P2PWorker:
        """Return a worker for caches where those of this side are."""
        if self.gpu is None:
            return P2PWorker(config, engine)
        lanes, device = lanes_of(self.gpu), self.gpu.device
        return P2PWorker(config, engine, lanes=lanes, device=device)

    def clear(self) -> None:
        """The step is over."""
        for worker in self.workers:
            worker.clear_connector_metadata()


@dataclasses.dataclass(eq=False)
class P2PGround:
    """``prefill`` saves a prompt's KV for ``decode``, any number of times."""

    scheme: Scheme
    direction: Direction
    model: ToyModel
    prefill: Side
    decode: Side
    store: StoreBuffer
    tasks: frozenset[asyncio.Task[Any]] | None = None

    def new_name(self) -> str:
        """Return the id of another transfer."""
        return f"t{next(_names)}"

    def save_request(self, name: str) -> SaveRequest:
        """Save all of the prompt, for ``decode``."""
        caches = self.prefill.caches[0]
        return SaveRequest(f"p {name}", name, "D", caches.tokens, (caches.block_ids,))

    def load_request(self, name: str, *, is_async: bool = True) -> LoadRequest:
        """Load what was saved."""
        caches = self.decode.caches[0]
        tokens = caches.tokens
        return LoadRequest(
            f"d {name}",
            name,
            "P",
            (caches.block_ids,),
            num_tokens=len(tokens),
            digest=prompt_digest(tokens, len(tokens)),
            shape=self.prefill.workers[0].engine.shape,
            is_async=is_async,
        )

    def begin_save(self, name: str) -> None:
        """Compute the prompt, and hand its layers over to be saved."""
        order = self.save_request(name)
        for caches in self.prefill.caches:
            caches.compute()
        for worker in self.prefill.workers:
            worker.bind_connector_metadata(P2PMetadata(saves=(order,)))
            for layer in self.model.layer_names:
                worker.save_kv_layer(layer)

    async def end_save(self, name: str) -> None:
        """Wait until the blocks are free, overwrite them, and wait until it is saved.

        :raises AssertionError: it could not be saved
        """
        for worker, caches in zip(
            self.prefill.workers, self.prefill.caches, strict=True
        ):
            await worker.wait_for_save()
            caches.spoil()
            await until_saved(worker)
            results = worker.get_finished()
            expect(results.finished_sending == {f"p {name}"}, results)
            expect(not results.failed_sending, results.reasons)
            worker.clear_connector_metadata()

    async def save(self, name: str) -> None:
        """Compute the prompt, and save it.

        :raises AssertionError: it could not be saved
        """
        self.begin_save(name)
        await self.end_save(name)

    async def begin_load(
        self, order: LoadRequest, workers: Sequence[P2PWorker] | None = None
    ) -> None:
        """Issue the load."""
        for worker in self.decode.workers if workers is None else workers:
            worker.bind_connector_metadata(P2PMetadata(loads=(order,)))
            await worker.start_load_kv()

    async def end_load(
        self, order: LoadRequest, workers: Sequence[P2PWorker] | None = None
    ) -> None:
        """Wait until it is loaded, and look at every byte.

        :raises AssertionError: it failed, or is not what was saved
        """
        for worker in self.decode.workers if workers is None else workers:
            await until_loaded(worker)
            results = worker.get_finished()
            expect(results.finished_recving == {order.request_id}, results)
            expect(not results.failed_recving, results.reasons)
            worker.clear_connector_metadata()
            self.decode.caches[worker.engine.rank].expect_computed()

    async def load(self, name: str, workers: Sequence[P2PWorker] | None = None) -> None:
        """Load it into caches that hold nothing of it, and look at every byte.

        :raises AssertionError: it failed, or is not what was saved
        """
        for worker in self.decode.workers if workers is None else workers:
            self.decode.caches[worker.engine.rank].spoil()
        order = self.load_request(name)
        await self.begin_load(order, workers)
        await self.end_load(order, workers)

    async def hand_over(self) -> None:
        """Do all of it.

        :raises AssertionError: it failed, or is not what was saved
        """
        name = self.new_name()
        await self.save(name)
        await self.load(name)

    def buffers(self) -> dict[tuple[str, int], LookupBuffer]:
        """Return the buffer of each rank that serves one."""
        return {
            (side.engine_id, worker.engine.rank): worker.routes.buffer
            for side in (self.prefill, self.decode)
            for worker in side.workers
            if worker.routes.buffer is not None
        }

    async def check_quiet(self) -> None:
        """Wait until nothing is under way.

        :raises AssertionError: something is left, and what
        """
        for watched in self._watched():
            await everything_is_quiet(watched)
        for worker in (*self.prefill.workers, *self.decode.workers):
            await has_let_go(worker)
            results = worker.get_finished()
            expect(not results, f"nobody waits for {results}")

    def _watched(self) -> Iterator[Watched]:
        for side, other in (
            (self.prefill, self.decode),
            (self.decode, self.prefill),
        ):
            for worker in side.workers:
                buffer, server = worker.routes.buffer, worker.routes.server
                if buffer is not None and server is not None:
                    peers = tuple(_peers_at(server.url, other))
                    yield Watched(buffer, self.store, server, peers, (), self.tasks)


async def until_loaded(worker: P2PWorker) -> None:
    """Wait until nothing is loaded any more."""
    await until(lambda: not worker.statistics().loading)


async def until_saved(worker: P2PWorker) -> None:
    """Wait until nothing is saved any more."""
    await until(lambda: not worker.statistics().saving)


async def has_let_go(worker: KVConnectorWorker) -> None:
    """Wait until no transfer of it is under way.

    :raises AssertionError: one is, and does not end
    """

    def left() -> tuple[int, ...]:
        now: Any = worker.statistics()
        return now.loading, now.saving, getattr(now, "releasing", 0)

    try:
        await until(lambda: not any(left()), timeout_s=_TIMEOUT_S / 2)
    except TimeoutError:
        raise AssertionError(f"left behind by a worker: {left()}") from None


def _peers_at(url: str, side: Side) -> Iterator[Peer]:
    place = url.partition("?")[0]
    for worker in side.workers:
        for line in worker.routes.peers._lines.values():
            if line.url.partition("?")[0] == place and line._peer is not None:
                yield line._peer


@contextlib.contextmanager
def urls_of(scheme: Scheme, *counts: int) -> Iterator[tuple[list[str], ...]]:
    """Yield places to serve at, so many for each engine."""
    if scheme == "tcp":
        free = iter(free_urls(sum(counts)))
        yield tuple([f"{next(free)}?payload=inline" for _ in range(n)] for n in counts)
        return
    name = f"asynckv-{secrets.token_hex(8)}"
    place = f"mem://{name}" if scheme == "mem" else f"unix://{_FOLDER / name}"
    yield tuple(
        [f"{place}-{side}" + (f".{rank}" if rank else "") for rank in range(n)]
        for side, n in enumerate(counts)
    )


@contextlib.asynccontextmanager
async def open_p2p(
    scheme: Scheme,
    direction: Direction = "pull",
    sizes: tuple[int, int] = (1, 1),
    model: ToyModel = SMALL,
    *,
    on_gpus: bool = False,
    are_buffers_there: bool = False,
    are_apart: bool = False,
    **options: object,
) -> AsyncIterator[P2PGround]:
    """Open engines of so many ranks, P and D, each of which has handed over once.

    ``on_gpus``: their caches are on a GPU that is not there, and with
    ``are_buffers_there`` so is what they keep and fetch, as of two processes; of two
    GPUs, if they ``are_apart``. ``options`` are those of connectors.
    """
    extra = {
        "direction": direction,
        "load_timeout_s": _TIMEOUT_S,
        "save_timeout_s": _TIMEOUT_S,
        **options,
    }
    async with contextlib.AsyncExitStack() as stack:
        gpus: list[FakeDevice | None] = [None, None]
        if on_gpus:
            count = 1 + are_apart
            there = stack.enter_context(faultless_gpus(count, seed=1, max_delay=2))
            gpu = fake_device_of(there.process())
            other = fake_device_of(there.process(), count - 1)
            gpus = [gpu, other if are_buffers_there else gpu]
        urls = stack.enter_context(urls_of(scheme, *sizes))
        buffers_on = "cuda" if are_buffers_there else "cpu"
        configs = pair_configs(urls[0], urls[1], extra, buffer_device=buffers_on)
        sides = [
            await stack.enter_async_context(_side(name, config, size, model, gpu))
            for name, config, size, gpu in zip("PD", configs, sizes, gpus, strict=True)
        ]
        store = await stack.enter_async_context(StoreBuffer("1MiB"))
        ground = P2PGround(scheme, direction, model, sides[0], sides[1], store)
        await ground.hand_over()
        await ground.check_quiet()
        ground.tasks = tasks_now()
        yield ground


@contextlib.asynccontextmanager
async def _side(
    name: str,
    config: KVTransferConfig,
    size: int,
    model: ToyModel,
    gpu: FakeDevice | None,
) -> AsyncIterator[Side]:
    shape = toy_shape(model, tp_size=size)
    side = Side(name, config, (), (), gpu)
    async with contextlib.AsyncExitStack() as stack:
        workers, caches = [], []
        for rank in range(size):
            engine = KVEngine(
                engine_id=name, block_size=16, rank=rank, tp_size=size, shape=shape
            )
            worker = await stack.enter_async_context(side.new_worker(config, engine))
            mine = ToyCaches(model, shape, rank, "PD".index(name), gpu)
            worker.register_kv_caches(mine.layers)
            await worker.start()
            workers.append(worker)
            caches.append(mine)
        yield dataclasses.replace(side, workers=tuple(workers), caches=tuple(caches))

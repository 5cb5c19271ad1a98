"""Interim."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

import msgspec
import torch

import asynckv
from asynckv.abc.connectors import KVConnectorScheduler, KVConnectorWorker
from asynckv.abc.steps import (
    BlockIds,
    KVConnectorMetadata,
    KVConnectorStep,
    KVRequest,
    KVTransferResults,
)
from asynckv.tensors.copying import CopyPool
from asynckv.types import KVFingerprint


class Save(msgspec.Struct, frozen=True):
    request_id: str
    entry_id: str
    token_ids: tuple[int, ...]
    block_ids: BlockIds


class Load(msgspec.Struct, frozen=True):
    request_id: str
    entry_id: str
    engine: str
    token_ids: tuple[int, ...]
    block_ids: BlockIds
    skip: int


class Meta(KVConnectorMetadata, frozen=True):
    saves: tuple[Save, ...] = ()
    loads: tuple[Load, ...] = ()
    aborted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()


class DirectScheduler(KVConnectorScheduler):
    def __init__(self, engine_id: str, block_size: int) -> None:
        self.engine_id, self.block_size = engine_id, block_size
        self.requests: dict[str, KVRequest] = {}
        self.saving: dict[str, str] = {}
        self.loading: set[str] = set()
        self.tried: set[str] = set()
        self.loads: list[Load] = []
        self.aborted: list[str] = []
        self.computed: dict[str, int] = {}
        self.dropped = 0
        self.sending: set[str] = set()

    def on_new_request(self, request: KVRequest) -> None:
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill") or request.request_id in self.tried:
            return 0, False
        there = min(int(str(params.get("num_tokens", 0))), request.num_tokens)
        if there < request.num_tokens:
            there -= there % self.block_size
        found = max(there - num_computed_tokens, 0)
        self.computed[request.request_id] = num_computed_tokens
        return found, found > 0

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        rid = request.request_id
        params = request.kv_transfer_params or {}
        if not num_external_tokens or rid in self.tried:
            return
        self.tried.add(rid)
        self.loading.add(rid)
        skip = self.computed[rid] // self.block_size
        last = -(-(self.computed[rid] + num_external_tokens) // self.block_size)
        self.loads.append(
            Load(
                rid,
                str(params["entry_id"]),
                str(params["engine_id"]),
                request.token_ids,
                tuple(tuple(some[:last]) for some in block_ids),
                skip,
            )
        )

    def build_connector_meta(self, step: KVConnectorStep) -> Meta:
        saves = []
        for some in step.scheduled:
            request = self.requests.get(some.request_id)
            if request is None or some.request_id in self.saving:
                continue
            params = request.kv_transfer_params or {}
            if not params.get("do_remote_decode"):
                continue
            if some.num_computed_tokens + some.num_scheduled_tokens < (
                request.num_tokens
            ):
                continue
            entry_id = uuid.uuid4().hex
            self.saving[some.request_id] = entry_id
            count = -(-request.num_tokens // self.block_size)
            saves.append(
                Save(
                    some.request_id,
                    entry_id,
                    request.token_ids,
                    tuple(ids[:count] for ids in some.block_ids),
                )
            )
        meta = Meta(tuple(saves), tuple(self.loads), tuple(self.aborted))
        self.loads, self.aborted = [], []
        return meta

    def update_connector_output(self, results: KVTransferResults) -> KVTransferResults:
        received = results.finished_recving & self.loading
        self.loading -= received
        sent = results.finished_sending & self.sending
        self.sending -= sent
        self.dropped += len(results.finished_recving) - len(received)
        self.dropped += len(results.finished_sending) - len(sent)
        return msgspec.structs.replace(
            results, finished_recving=received, finished_sending=sent
        )

    def request_finished(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        rid = request.request_id
        self.requests.pop(rid, None)
        self.tried.discard(rid)
        self.computed.pop(rid, None)
        if rid in self.loading:
            self.aborted.append(rid)
            return False, None
        entry_id = self.saving.pop(rid, None)
        if entry_id is None:
            return False, None
        self.sending.add(rid)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "entry_id": entry_id,
            "engine_id": self.engine_id,
            "num_tokens": request.num_tokens,
        }

    def shutdown(self) -> None:
        pass


class DirectWorker(KVConnectorWorker):
    def __init__(
        self,
        engine_id: str,
        listen: str | None,
        peers: list[str],
        fingerprint: Mapping[str, str],
        block_size: int,
        timeout_s: float = 10.0,
    ) -> None:
        self.engine_id, self.listen, self.peers = engine_id, listen, peers
        self.fingerprint = KVFingerprint.of(fingerprint)
        self.block_size = block_size
        self.timeout_s = timeout_s
        self.stack = AsyncExitStack()
        self.pool = CopyPool()
        self.meta = Meta()
        self.done = KVTransferResults()
        self.saved: set[str] = set()
        self.finished: set[str] = set()
        self.links: dict[str, asynckv.abc.KVLookupBuffer] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.loads = self.saves = self.failed = self.loaded_bytes = 0
        self.load_seconds: list[float] = []

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Mapping[str, int] | None = None,
    ) -> None:
        self.caches = kv_caches
        self.groups = groups or dict.fromkeys(kv_caches, 0)

    async def start(self) -> None:
        self.buffer = asynckv.LookupBuffer(
            "1GiB", fingerprint=self.fingerprint, drain_s=0
        )
        if self.listen:
            await self.stack.enter_async_context(self.buffer)
            await self.stack.enter_async_context(
                asynckv.serve(self.listen, lookup=self.buffer, identity=self.engine_id)
            )

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, Meta)
        self.meta = metadata

    def clear_connector_metadata(self) -> None:
        self.meta = Meta()

    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        for rid in self.meta.aborted:
            task = self.tasks.get(rid)
            if task is not None:
                task.cancel()
        for load in self.meta.loads:
            self.tasks[load.request_id] = asyncio.create_task(self._load(load))

    async def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        pass

    async def wait_for_save(self) -> None:
        for save in self.meta.saves:
            self.tasks[save.request_id] = asyncio.create_task(self._save(save))

    def get_finished(
        self, finished_req_ids: frozenset[str] = frozenset()
    ) -> KVTransferResults:
        self.finished |= finished_req_ids
        sent = self.saved & self.finished
        self.saved -= sent
        self.finished &= {r for r in self.tasks}
        done, self.done = self.done, KVTransferResults()
        return done | KVTransferResults(finished_sending=frozenset(sent))

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def statistics(self) -> object:
        return None

    async def aclose(self) -> None:
        for task in list(self.tasks.values()):
            task.cancel()
        if self.tasks:
            await asyncio.wait(list(self.tasks.values()))
        await self.stack.aclose()
        self.pool.close()

    def abort(self) -> None:
        pass

    async def _save(self, save: Save) -> None:
        key = {
            layer: asynckv.KVBlocks(cache, save.block_ids[self.groups[layer]])
            for layer, cache in self.caches.items()
        }
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.buffer.insert(
                    list(save.token_ids), None, key, None, None, entry_id=save.entry_id
                )
            self.saves += 1
        except (asynckv.AsyncKVError, TimeoutError) as exc:
            print("save failed", repr(exc))
            self.failed += 1
        finally:
            self.tasks.pop(save.request_id)
            self.saved.add(save.request_id)
            self.callback()

    async def _load(self, load: Load) -> None:
        failed = False
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._load_now(load)
            self.loads += 1
            self.load_seconds.append(time.monotonic() - began)
        except asyncio.CancelledError:
            failed = True
        except (asynckv.AsyncKVError, TimeoutError, ValueError, OSError) as exc:
            print("load failed", repr(exc), flush=True)
            failed = True
            self.failed += 1
        finally:
            self.tasks.pop(load.request_id)
            bad = frozenset(load.block_ids[0][load.skip :]) if failed else frozenset()
            rid = frozenset({load.request_id})
            self.done |= KVTransferResults(
                finished_recving=rid,
                failed_recving=rid if failed else frozenset(),
                invalid_block_ids=bad,
            )
            self.callback()

    async def _load_now(self, load: Load) -> None:
        lookup = await self._link(load.engine)
        async with lookup.drop_select(entry_id=load.entry_id) as entry:
            assert isinstance(entry.key, Mapping) and entry.input_tokens is not None
            tokens = tuple(entry.input_tokens.tolist())
            if tokens != load.token_ids[: len(tokens)]:
                raise ValueError("other tokens")
            sources, targets = [], []
            for layer, cache in self.caches.items():
                ids = load.block_ids[self.groups[layer]]
                sources.append(entry.key[layer][load.skip : len(ids)])
                targets.append(asynckv.KVBlocks(cache, ids[load.skip :]))
            await self.pool.copy(sources, targets, digest=False)

    async def _link(self, engine: str) -> "asynckv.abc.KVLookupBuffer":
        error: Exception = asynckv.PeerLost(f"no peer {engine}")
        if engine in self.links and self.links[engine]._peer.is_connected:  # type: ignore
            return self.links[engine]
        for url in self.peers:
            try:
                peer = await self.stack.enter_async_context(
                    asynckv.connect(url, fingerprint=self.fingerprint, reconnect_s=0)
                )
            except asynckv.AsyncKVError as exc:
                error = exc
                continue
            self.links[peer.identity] = peer.lookup
        if engine in self.links:
            return self.links[engine]
        raise error

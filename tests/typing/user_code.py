"""A user's code that makes every public call. Only type checkers read it.

It needs no cast, no assert and no ``type: ignore`` under ``mypy --strict``;
``tests/test_exports.py`` says what may not be missing here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from fastapi import Depends, FastAPI, Request, Response
from starlette.applications import Starlette

import asynckv
from asynckv import abc, connectors
from asynckv.integrations import fastapi as kv

TOKENS = [1, 2, 3]
SPECS: Mapping[str, asynckv.TensorSpec] = {
    "0.key": asynckv.TensorSpec((2, 4), "bfloat16"),
    "extras.logits": asynckv.TensorSpec((8,), "float32"),
}


def use(*values: object) -> None:
    """Stand in for whatever is done with them."""


def take_apart(entry: asynckv.KVEntry) -> int:
    tokens, roi, key, value, hidden = entry
    layers: Mapping[str, tuple[torch.Tensor, ...]] = entry.layers
    nbytes = sum(tensor.nbytes for tensor in entry.tensors()) + entry.nbytes
    for key_of_layer, value_of_layer in layers.values():
        nbytes += key_of_layer.nbytes + value_of_layer.nbytes
    nbytes += entry.key_tensor.nbytes + entry.value_tensor.nbytes
    nbytes += sum(extra.nbytes for extra in entry.extras.values())
    use(tokens, roi, key, value, hidden, entry.input_tokens, entry.roi, entry.hidden)
    use(entry.entry_id.upper(), entry.key, entry.value)
    return nbytes + entry.matched_tokens + entry.attempt


async def use_lookup(lookup: asynckv.KVLookupBuffer) -> None:
    key = lookup.empty((2, 4), torch.bfloat16)
    blocks = asynckv.KVBlocks(torch.zeros(8, 16), [1, 3])
    entry_id: str = await lookup.insert(TOKENS, None, key, blocks, None)
    await lookup.insert(
        torch.tensor(TOKENS),
        [1, 1, 0],
        {"0": key},
        None,
        key,
        extras={"logits": key},
        entry_id="mine",
        ttl_s=None,
        deliveries=2,
    )
    take_apart(await lookup.drop_select(TOKENS, min_matched_tokens=2))
    take_apart(await asyncio.create_task(lookup.drop_select(entry_id=entry_id)))
    async with lookup.drop_select(
        TOKENS, None, match="exact", into={"key": key, "value": blocks}
    ) as entry:
        take_apart(entry)
    matched: int = await lookup.peek(TOKENS, None)
    await lookup.taken(entry_id)
    was_there: bool = await lookup.withdraw(entry_id)
    now: abc.KVLookupStatistics = lookup.statistics()
    use(now.used_bytes / now.max_bytes, now.waiting_inserts + now.waiting_selects)
    use(matched, was_there)


async def compute_layers(writer: asynckv.InsertWriter) -> None:
    use(writer.entry_id)
    await writer.put("0.key", torch.zeros(2, 4, dtype=torch.bfloat16))


async def read_layers(stream: asynckv.SelectStream) -> AsyncIterator[str]:
    use(stream.entry_id, stream.attempt, stream.matched_tokens, stream.input_tokens)
    logits: torch.Tensor = await stream.wait_for("extras.logits")
    use(stream.roi, stream.specs["0.key"].shape, logits.shape)
    async for name, tensor in stream:
        yield f"{name} {tensor.nbytes}"


async def use_layers(lookup: asynckv.KVLookupBuffer) -> None:
    async with lookup.open_insert(TOKENS, None, SPECS, entry_id="mine") as writer:
        await compute_layers(writer)
    async with lookup.open_drop_select(TOKENS, None, match="prefix") as stream:
        async for line in read_layers(stream):
            use(line.upper())


async def use_store(store: asynckv.KVStoreBuffer, tensor: torch.Tensor) -> None:
    keys: Sequence[str] = connectors.prefix_block_keys(TOKENS, 16, salt="tenant")
    await store.put("key", tensor)
    await store.put("key", tensor, ttl_s=600.0, pin=True)
    await store.put("key", None)
    if (found := await store.get("key", into=tensor)) is not None:
        use(found.shape)
    flags: tuple[bool, ...] = await store.contains(keys)
    flags = await store.put_many([("key", tensor), ("other", tensor)], ttl_s=600.0)
    several: tuple[torch.Tensor | None, ...] = await store.get_many(keys, [tensor])
    use(several[0], match := await store.match_prefix(keys), match.by_tier["disk"])
    if (told := await store.stat("key")) is not None and told.spec is not None:
        use(told.spec.shape, told.tiers[0], told.ttl_s, told.is_pinned)
    async with store.pin(keys[:match], within_s=2.0) as there:
        use(flags == there, await store.delete("key"), await store.clear())
    now: abc.KVStoreStatistics = store.statistics()
    use(now.hits / (now.hits + now.misses), now.waiting_puts, now.used_bytes)


async def use_any(buffer: asynckv.KVCacheBuffer) -> None:
    now: abc.KVCacheStatistics = buffer.statistics()
    use(now.used_bytes / now.max_bytes)
    await buffer.aclose()
    buffer.abort()


async def use_buffers(tls: asynckv.TLS) -> None:
    fingerprint = asynckv.KVFingerprint(model="m", dtype="bfloat16")
    lookup = asynckv.LookupBuffer("1GiB", fingerprint=fingerprint, max_hold_s=60)
    store = asynckv.StoreBuffer(10**9, fingerprint=fingerprint)
    url = "tls://0.0.0.0:0"
    async with (
        lookup,
        store,
        asynckv.serve(url, lookup=lookup, store=store, tls=tls) as s,
    ):
        serving: asynckv.Server = s
        serving.call_when_lost(lambda peer: use(peer.id))
        use([peer.id for peer in serving.peers], serving.waiting_bytes)
        use(lookup.statistics().expired, store.statistics().evictions)
        use(serving.refused_requests, repr(serving))
        async with asynckv.connect(s.url, fingerprint={"model": "m"}, tls=tls) as peer:
            await use_peer(peer)


async def use_peer(peer: asynckv.Peer) -> None:
    use(peer.transport, peer.identity, peer.incarnation, peer.role, peer.is_connected)
    await use_lookup(peer.lookup)
    await use_layers(peer.lookup)
    await use_store(peer.store, torch.zeros(1))
    await use_any(peer.lookup)
    use(peer.lookup.statistics().is_connected, peer.store.statistics().getting)
    await peer.aclose()
    peer.abort()


async def use_node(text: str) -> None:
    config = asynckv.KVTransferConfig.from_json(text)
    async with asynckv.open(config, drain_s=5, device="cpu") as opened:
        node: asynckv.Node = opened
        await use_lookup(node.lookup)
        use(node.url, node.server, node.peer, node.config.kv_role)


async def use_pipe(pipe: asynckv.KVPipe) -> None:
    await pipe.send_tensor(torch.zeros(3))
    await pipe.send_tensor(None)
    await pipe.send_tensor(torch.zeros(3), copy=False)
    await pipe.flush()
    received: torch.Tensor | None = await pipe.recv_tensor(into=torch.zeros(3))
    async for tensor in pipe:
        use(received, tensor)
    await pipe.aclose()
    pipe.abort()


async def use_pipes(secret: Path) -> None:
    async with asynckv.listen_pipe("tcp://127.0.0.1:0", secret_file=secret) as listener:
        async with asynckv.open_pipe(listener.url, secret_file=str(secret)) as pipe:
            await use_pipe(pipe)
            use(pipe.peer, pipe.transport, pipe.statistics().sent_bytes)
        async with await listener.accept() as accepted:
            await use_pipe(accepted)
    async with asynckv.join_group(rank=0, size=2, host="h", port=1) as group:
        await use_pipe(group.pipe_to(1))
        await use_pipe(group.next_pipe)
        await use_pipe(group.prev_pipe)
        await group.barrier()


async def use_pipes_of_gpus(url: str) -> None:
    gpu = torch.device("cuda", 0)
    async with asynckv.listen_pipe(url, device=gpu) as listener:
        async with asynckv.open_pipe(listener.url, device="cuda") as pipe:
            await pipe.gpus_settled()
            await use_pipe(pipe)
    async with asynckv.join_group(
        rank=0, size=2, host="h", port=1, device="cuda:0"
    ) as group:
        await group.next_pipe.gpus_settled()


async def handle_errors(lookup: asynckv.KVLookupBuffer) -> str:
    try:
        await lookup.taken("id")
    except (asynckv.EntryAborted, asynckv.EntryConflict, asynckv.LeaseLost) as exc:
        return f"{exc.message} {exc.hint}"
    except asynckv.EntryTooLarge as exc:
        return f"{exc.nbytes} of {exc.max_bytes}"
    except asynckv.IncompatiblePeer as exc:
        return exc.field
    except asynckv.PipeBroken as exc:
        return f"{exc.maybe_delivered}"
    except (asynckv.PeerRestarted, asynckv.PeerLost, asynckv.BufferClosed) as exc:
        return exc.hint
    except (asynckv.GPUFailed, asynckv.GPUUnavailable, asynckv.Overloaded) as exc:
        return exc.hint
    except (asynckv.AuthError, asynckv.ConfigError, asynckv.WrongRole) as exc:
        return exc.hint
    except (asynckv.ChecksumError, asynckv.EndOfStream, asynckv.WrongLoop) as exc:
        return exc.hint
    except asynckv.ProtocolError as exc:
        return exc.hint
    except asynckv.AsyncKVError as exc:
        return exc.hint
    return ""


def decide(scheduler: abc.KVConnectorScheduler) -> abc.KVConnectorMetadata:
    request = abc.KVRequest("id", (1, 2, 3), {"transfer": "id"}, salt="tenant")
    blocks: abc.BlockIds = ((0, 1),)
    scheduler.on_new_request(request)
    num_tokens, is_async = scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, blocks, num_tokens or 0)
    scheduled = abc.KVScheduled(request.request_id, blocks, 0, request.num_tokens)
    step = abc.KVConnectorStep((scheduled,), preempted=frozenset({"other"}))
    metadata = scheduler.build_connector_meta(step)
    results = scheduler.update_connector_output(abc.KVTransferResults())
    must_wait, params = scheduler.request_finished(request, blocks)
    if isinstance(scheduler, abc.SupportsHMA):
        must_wait, params = scheduler.request_finished_all_groups(request, blocks)
    if isinstance(scheduler, abc.TakesHandshakes):
        scheduler.set_handshake_metadata({0: abc.KVConnectorHandshake(0)})
    use(results.reasons, must_wait, params, is_async, abc.supports_hma(scheduler))
    use(scheduler.get_finished_count(), scheduler.has_pending_work())
    use(scheduler.reset_cache(), scheduler.statistics())
    use(scheduler.get_required_kvcache_layout())
    scheduler.shutdown()
    return metadata


async def ask(scheduler: abc.AsksElsewhere) -> None:
    await scheduler.start()
    for question in scheduler.take_questions():
        answer: abc.KVAnswer = await scheduler.ask(question)
        scheduler.take_answer(answer)
        scheduler.take_answer(abc.KVQuestion("id", ("key",)).answered(0))


async def step_once(
    worker: abc.KVConnectorWorker, metadata: abc.KVConnectorMetadata
) -> None:
    caches = {"0": torch.zeros(2, 8, 16)}
    if isinstance(worker, abc.SupportsCrossLayerCaches):
        worker.register_cross_layers_kv_cache(torch.zeros(1, 8, 16), ["0"])
    else:
        worker.register_kv_caches(caches, groups={"0": 0})
    if isinstance(worker, abc.SupportsHostCopies):
        worker.set_host_xfer_buffer_ops(lambda source, target, here, there, way: None)
    await worker.start()
    worker.call_when_finished(lambda: None)
    worker.bind_connector_metadata(metadata)
    worker.handle_preemptions(metadata)
    if isinstance(worker, abc.SupportsStreams):
        worker.follow(worker.mark_stream())
    await worker.start_load_kv()
    if isinstance(worker, abc.SupportsLayerwise) and worker.wants_layers:
        await worker.wait_for_layer_load("0")
        worker.save_kv_layer("0", caches["0"], None)
    await worker.wait_for_save()
    if isinstance(worker, abc.SupportsHeldBlocks):
        worker.let_go_of_blocks({"id"})
    if isinstance(worker, abc.SupportsHandshake):
        use(worker.get_handshake_metadata())
    results: abc.KVTransferResults = worker.get_finished(frozenset({"id"}))
    worker.clear_connector_metadata()
    use(results.finished_recving, worker.statistics(), worker.metadata_type)
    await worker.shutdown()


async def use_connectors(config: asynckv.KVTransferConfig) -> None:
    engine = connectors.KVEngine(engine_id="one", block_size=16)
    kind: connectors.KVConnectorKind = connectors.find_connector(config)
    use(kind.name, connectors.get_kv_connector_cache_layout(config))
    use(connectors.P2PConnector, connectors.StoreConnector, connectors.MultiConnector)
    use(connectors.CONNECTORS[kind.name].scheduler_type)
    scheduler = connectors.make_scheduler(config, engine)
    if isinstance(scheduler, abc.AsksElsewhere):
        await ask(scheduler)
    await step_once(connectors.make_worker(config, engine), decide(scheduler))


async def use_tiers() -> None:
    async with asynckv.TieredStore("1GiB", ["disk:///kv?max=1GiB"]) as store:
        await use_store(store, torch.zeros(1))
        match = await store.match_prefix(["key"])
        use(match.ready, match.by_tier["disk"], (await store.flush())["disk"].dropped)
        use(store.statistics().tiers["disk"].hits)


def make_app(store: asynckv.StoreBuffer) -> FastAPI:
    app = FastAPI(lifespan=kv.lifespan(serve="tcp://127.0.0.1:0", store=store))
    app.include_router(kv.health_router())

    @app.get("/decode")
    @kv.cancel_on_disconnect
    async def decode(
        buffer: Annotated[asynckv.KVLookupBuffer, Depends(kv.lookup)],
        cache: Annotated[asynckv.KVStoreBuffer, Depends(kv.store)],
    ) -> Response:
        await use_store(cache, torch.zeros(1))
        selecting = buffer.open_drop_select(TOKENS)
        return await kv.stream_response(selecting, read_layers)

    return app


async def starlette_route(request: Request) -> int:
    app = Starlette(routes=kv.health_routes())
    use(app, (await kv.store(request)).statistics())
    return await (await kv.lookup(request)).peek(TOKENS)

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import types
from typing import Any

import pytest
import torch

from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.cli.main import main
from asynckv.errors import ConfigError
from asynckv.integrations.vllm.settings import Settings

LISTEN = "tcp://127.0.0.1:14579"


class FullAttentionSpec(types.SimpleNamespace):
    block_size, page_size_bytes = 32, 4096


class SlidingWindowSpec(FullAttentionSpec):
    pass


@dataclasses.dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    host_resident: bool = False
    enable_kv_transfer: bool = True


def cache_config(*groups: Group) -> Any:
    return types.SimpleNamespace(
        kv_cache_groups=list(groups) or [Group(["layer"], FullAttentionSpec())]
    )


class HfConfig(dict[str, Any]):
    def to_dict(self) -> dict[str, Any]:
        return dict(self)


HF = {"rope_theta": 1e4, "layers": [1, 2], "_name_or_path": "/here", "odd": object()}


def vllm_config(
    *,
    dtype: str = "bfloat16",
    tp: int = 1,
    model: dict[str, Any] | None = None,
    hf: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    extra = {"listen": LISTEN, **given.pop("extra", {})}
    transfer: dict[str, Any] = {
        "engine_id": "p",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }
    namespace = types.SimpleNamespace
    parallel: dict[str, Any] = {"rank": 0, "tensor_parallel_size": tp, **given}
    return namespace(
        kv_transfer_config=namespace(**transfer),
        cache_config=namespace(block_size=32, cache_dtype="auto"),
        model_config=namespace(
            **{"model": "tiny", "dtype": dtype, "revision": None}
            | {"quantization": None, "hf_config": HfConfig({**HF, **(hf or {})})}
            | (model or {})
        ),
        parallel_config=namespace(**parallel),
    )


def fingerprint(config: Any, cache: Any = None, attention: str = "A") -> Any:
    settings = Settings.of(
        config, cache or cache_config(), side="worker", attention=attention
    )
    return settings.config.fingerprint


def settings_of(
    config: Any = None, cache: Any = None, side: Any = "worker"
) -> Settings:
    return Settings.of(config or vllm_config(), cache or cache_config(), side=side)


@pytest.mark.parametrize(
    ("extra", "direction", "device"),
    [
        ({}, "pull", "cpu"),
        ({"direction": "push"}, "push", "cpu"),
        ({"buffer_device": "cuda"}, "pull", "cuda"),
    ],
)
def test_kv_is_fetched_and_waits_in_host_memory_unless_it_is_said_otherwise(
    extra: dict[str, Any], direction: str, device: str
) -> None:
    config = settings_of(vllm_config(extra=extra)).config
    assert config.kv_connector_extra_config["direction"] == direction
    assert config.kv_buffer_device == device


@pytest.mark.parametrize(("side", "rank"), [("worker", 1), ("scheduler", 0)])
def test_the_scheduler_is_of_no_rank(side: str, rank: int) -> None:
    assert settings_of(vllm_config(tp=2, rank=1), side=side).engine.rank == rank


def test_a_save_is_given_up_before_an_engine_that_waits_for_it_is() -> None:
    config = vllm_config(extra={"save_timeout_s": 100.0})
    assert settings_of(config).longest_save_s > 100


@pytest.mark.parametrize(
    ("number", "tp", "port"), [(0, 1, 14579), (1, 1, 14580), (2, 2, 14583)]
)
def test_each_data_parallel_rank_listens_behind_those_before_it(
    number: int, tp: int, port: int
) -> None:
    config = vllm_config(tp=tp, data_parallel_index=number, data_parallel_size=1)
    extra = settings_of(config).config.kv_connector_extra_config
    assert extra["listen"] == f"tcp://127.0.0.1:{port}"


def test_every_layer_knows_its_group_and_how_much_a_block_takes_in_all() -> None:
    groups = cache_config(
        Group(["a", "b"], FullAttentionSpec()), Group(["c"], FullAttentionSpec())
    )
    settings = settings_of(cache=groups)
    assert settings.groups == {"a": 0, "b": 0, "c": 1}
    assert settings.engine.block_nbytes == 3 * 4096


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", vllm_config(extra={"fingerprint": "another"})),
        ("dtype", vllm_config(dtype="float32")),
        ("layout", vllm_config(tp=2)),
        ("model", vllm_config(model={"revision": "old"})),
        ("details", vllm_config(model={"quantization": "fp8"})),
        ("details", vllm_config(hf={"rope_theta": 5e5})),
        ("details", vllm_config(hf={"rope_scaling": {"factor": 8}})),
    ],
)
def test_what_must_be_equal_is_named_where_it_differs(field: str, other: Any) -> None:
    assert fingerprint(vllm_config()).difference(fingerprint(vllm_config())) is None
    assert fingerprint(vllm_config()).difference(fingerprint(other)) == field


def test_whether_prompts_may_be_long_is_told_where_keys_depend_on_it() -> None:
    def engine(most: int, kind: str) -> Any:
        rope = {"rope_type": kind, "original_max_position_embeddings": 128}
        hf = {"text_config": {"rope_parameters": rope}}
        return fingerprint(vllm_config(hf=hf, model={"max_model_len": most}))

    short, long = engine(128, "longrope"), engine(129, "longrope")
    assert short.difference(long) == "details"
    assert short.difference(engine(64, "longrope")) is None
    assert long.difference(engine(1024, "longrope")) is None
    assert "rope for more than 128 tokens" in long.details
    assert engine(128, "yarn").difference(engine(129, "yarn")) is None


def test_another_vllm_may_lay_out_blocks_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = fingerprint(vllm_config())
    newer = types.SimpleNamespace(__version__="0.99")
    monkeypatch.setitem(sys.modules, "vllm", newer)
    assert ours.difference(fingerprint(vllm_config())) == "details"


def test_another_backend_or_kernel_block_may_lay_out_blocks_otherwise() -> None:
    ours = fingerprint(vllm_config(), attention="A, kernel blocks of 32")
    for other in ("B, kernel blocks of 32", "A, kernel blocks of 16"):
        theirs = fingerprint(vllm_config(), attention=other)
        assert ours.difference(theirs) == "details"
    assert "attention: A, kernel blocks of 32" in ours.details


def test_both_roles_have_one_fingerprint_of_what_workers_say() -> None:
    config, cache = vllm_config(), cache_config()
    worker = Settings.of(config, cache, side="worker", attention="A")
    scheduler = Settings.of(config, cache, side="scheduler", attention="A")
    assert worker.config.fingerprint == scheduler.config.fingerprint


def test_a_layout_version_replaces_that_of_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = vllm_config(extra={"layout_version": "7"})
    ours, plain = fingerprint(config), fingerprint(vllm_config())
    newer = types.SimpleNamespace(__version__="0.99")
    monkeypatch.setitem(sys.modules, "vllm", newer)
    assert ours.difference(fingerprint(config)) is None
    assert ours.difference(plain) == "details"
    other = vllm_config(extra={"layout_version": "8"})
    assert ours.difference(fingerprint(other)) == "details"


def test_a_layout_that_is_asked_for_is_no_option_of_the_connector_itself() -> None:
    said = vllm_config(extra={"kv_cache_layout": "BLHNC"})
    assert settings_of(said).longest_save_s > 0


def test_where_a_model_was_read_does_not_matter_if_it_is_called_the_same() -> None:
    ours, theirs = (
        vllm_config(
            model={"model": path, "revision": revision},
            hf={"_name_or_path": path, "transformers_version": path},
            extra={"fingerprint": "tiny"},
        )
        for path, revision in (("/here", None), ("/there", "main"))
    )
    assert fingerprint(ours).difference(fingerprint(theirs)) is None


def test_other_layers_are_another_layout() -> None:
    other = cache_config(Group(["layer", "more"], FullAttentionSpec()))
    ours, theirs = fingerprint(vllm_config()), fingerprint(vllm_config(), other)
    assert ours.difference(theirs) == "layout"


@pytest.mark.parametrize(
    ("config", "cache", "why"),
    [
        (vllm_config(extra={"mode": "p2"}), None, "mode is 'p2'"),
        (vllm_config(pipeline_parallel_size=2), None, "pipeline_parallel_size is 2"),
        (vllm_config(data_parallel_size=2), None, "data_parallel_size is 2"),
        (
            vllm_config(),
            cache_config(Group(["a"], SlidingWindowSpec())),
            "does not keep a whole prompt",
        ),
        (
            vllm_config(),
            cache_config(Group(["a"], FullAttentionSpec(), host_resident=True)),
            "cannot be moved yet",
        ),
        (
            vllm_config(),
            cache_config(Group(["a"], FullAttentionSpec(), enable_kv_transfer=False)),
            "cannot be moved yet",
        ),
        (
            vllm_config(),
            cache_config(
                Group(["a"], FullAttentionSpec()),
                Group(["b"], FullAttentionSpec(block_size=64)),
            ),
            "layers like b have blocks of 64 tokens, and others of 32",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(
    config: Any, cache: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        settings_of(config, cache)


def test_an_option_that_is_none_is_refused_when_the_engine_starts() -> None:
    settings = settings_of(vllm_config(extra={"lisen": "x"}), side="scheduler")
    with pytest.raises(ConfigError, match="lisen"):
        settings.make_scheduler()


@pytest.mark.parametrize(("mode", "is_store"), [("p2p", False), ("store", True)])
def test_a_store_sees_all_requests_and_tells_of_no_saves(
    mode: str, is_store: bool
) -> None:
    config = vllm_config(extra={"mode": mode, "store": "mem://s"})
    settings = settings_of(config, side="scheduler")
    assert (settings.sees_all, settings.reports_saves) == (is_store, not is_store)


async def test_what_is_logged_of_the_fingerprint_clears_what_was_put_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vllm.asynckv")
    config = vllm_config(extra={"mode": "store", "store": "mem://s"})
    settings = settings_of(config, side="scheduler")
    settings.make_scheduler()
    (line,) = caplog.messages
    _, _, logged = line.partition(" is ")

    def clear(url: str) -> None:
        with pytest.raises(SystemExit, match="^0$"):
            main(["store", "clear", url, "--fingerprint", logged])

    async with StoreBuffer() as store, serve("tcp://127.0.0.1:0", store=store) as at:
        async with connect(at.url, fingerprint=settings.config.fingerprint) as peer:
            await peer.store.put("key", torch.ones(1))
            await asyncio.to_thread(clear, at.url)
            assert await peer.store.contains(["key"]) == (False,)

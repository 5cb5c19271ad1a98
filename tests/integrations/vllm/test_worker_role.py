from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import msgspec
import pytest
import torch

from asynckv.abc import (
    BlockIds,
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorWorker,
    KVTransferResults,
    SupportsHandshake,
    SupportsHeldBlocks,
    SupportsLayerwise,
    SupportsStreams,
)
from asynckv.errors import GPUFailed
from asynckv.integrations.vllm.worker_role import WorkerRole


class Order(msgspec.Struct, frozen=True):
    request_id: str
    block_ids: BlockIds = ()
    refusal: str = ""


class Orders(KVConnectorMetadata, frozen=True):
    loads: tuple[Order, ...] = ()
    saves: tuple[Order, ...] = ()


class Worker(KVConnectorWorker, SupportsLayerwise, SupportsHandshake):
    """Notes what it is told; ends a load at once, a save when it is let."""

    loaded_bytes = saved_bytes = 0
    links: int | None = None

    def __init__(self) -> None:
        self.log: list[str] = []
        self.bound = Orders()
        self.done: list[KVTransferResults] = []
        self.may_save = asyncio.Event()
        self.is_refusing = self.is_failing = self.is_losing_saves = False
        self.wants = True

    @property
    def wants_layers(self) -> bool:
        return self.wants

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Mapping[str, int] | None = None,
    ) -> None:
        self.log.append(f"register {len(kv_caches)}")
        self.groups = groups

    async def start(self) -> None:
        self.log.append("start")

    def get_handshake_metadata(self) -> KVConnectorHandshake | None:
        return KVConnectorHandshake(3, "incarnation")

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        if self.is_refusing:
            raise RuntimeError("not now")
        assert isinstance(metadata, Orders)
        self.bound = metadata
        self.log.append("bind")

    def clear_connector_metadata(self) -> None:
        self.log.append("clear")

    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        self.log.append("load")
        if self.is_failing:
            raise ValueError("nobody thought of this")
        for order in self.bound.loads:
            self.loaded_bytes += 100
            ids = frozenset({order.request_id})
            self._end(KVTransferResults(finished_recving=ids))

    async def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        self.log.append(layer_name)

    async def wait_for_save(self) -> None:
        saves = self.bound.saves
        self.log.append("save")
        if self.is_losing_saves:
            raise RuntimeError("nobody thought of this")
        try:
            await self.may_save.wait()
        except asyncio.CancelledError:
            self.log.append("given up")
            raise
        for order in saves:
            ids = frozenset({order.request_id})
            self._end(KVTransferResults(finished_sending=ids))

    def get_finished(
        self, finished_req_ids: frozenset[str] = frozenset()
    ) -> KVTransferResults:
        ended = KVTransferResults()
        while self.done:
            ended |= self.done.pop()
        return ended

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def statistics(self) -> object:
        return self

    async def aclose(self) -> None:
        self.log.append("close")

    def abort(self) -> None:
        raise NotImplementedError

    def _end(self, ended: KVTransferResults) -> None:
        self.done.append(ended)
        self.callback()


class HoldingWorker(Worker, SupportsHeldBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[Set[str] | None] = []

    def let_go_of_blocks(self, request_ids: Set[str] | None) -> None:
        self.wanted.append(request_ids)
        self.may_save.set()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@contextlib.contextmanager
def role_of(worker: Worker, **options: Any) -> Iterator[WorkerRole]:
    """Yield a role whose worker has begun, and noted nothing yet."""
    role = WorkerRole("test", lambda: worker, **options)
    role.register({"layer": torch.zeros(2, 2)}, {"layer": 0})
    worker.log.clear()
    yield role
    role.shutdown()


@pytest.fixture
def role(worker: Worker) -> Iterator[WorkerRole]:
    with role_of(worker) as role:
        yield role


def step(role: WorkerRole, orders: KVConnectorMetadata | None, *layers: str) -> None:
    role.begin_step(orders)
    for layer in layers:
        role.save_layer(layer)
    role.start_loads()
    role.end_step()


def wait_for(role: WorkerRole) -> KVTransferResults:
    while not (ended := role.results()):
        threading.Event().wait(0.001)
    return ended


def wait_quiet_until(
    role: WorkerRole, request_ids: set[str], call: Callable[..., None], *args: Any
) -> None:
    """Wait until these are quiet, which they are once the loop has called that."""
    timer = threading.Timer(0.05, lambda: role._bridge.call(call, *args))
    timer.start()
    role.wait_released(request_ids)
    timer.join()


def settle(role: WorkerRole) -> None:
    """Let the loop do what it was told so far."""
    role._bridge.run(asyncio.sleep, 0.01, timeout_s=5)


def test_registering_starts_the_worker_and_learns_who_it_is(worker: Worker) -> None:
    role = WorkerRole("test", lambda: worker)
    role.register({"layer": torch.zeros(2, 2)}, {"layer": 0})
    assert worker.log == ["register 1", "start"]
    assert worker.groups == {"layer": 0}
    assert role.handshake == KVConnectorHandshake(3, "incarnation")
    role.shutdown()
    role.shutdown()
    assert worker.log[-1] == "close"


def test_a_step_without_orders_says_nothing_to_the_loop(
    role: WorkerRole, worker: Worker
) -> None:
    step(role, None, "layer")
    settle(role)
    assert worker.log == []
    assert not role.results()
    assert role.take_counts() is None


def test_the_parts_of_a_step_come_in_order(role: WorkerRole, worker: Worker) -> None:
    step(role, Orders(loads=(Order("a", ((1,),)),)), "one", "two")
    step(role, Orders())
    settle(role)
    assert worker.log == [
        *["bind", "one", "two", "load", "save", "clear"],
        *["bind", "load", "save", "clear"],
    ]


def test_a_step_is_told_to_the_loop_at_once_when_it_is_over(worker: Worker) -> None:
    worker.wants = False
    with role_of(worker) as role:
        role.begin_step(Orders(loads=(Order("a", ((1,),)),)))
        role.save_layer("one")
        role.start_loads()
        settle(role)
        assert worker.log == []
        role.end_step()
        settle(role)
        assert worker.log == ["bind", "load", "save", "clear"]


def test_a_layer_does_not_wait_for_the_end_of_its_step(
    role: WorkerRole, worker: Worker
) -> None:
    role.begin_step(Orders(saves=(Order("a"),)))
    role.save_layer("one")
    settle(role)
    assert worker.log == ["bind", "one"]


def test_layers_are_told_only_to_who_wants_them(worker: Worker) -> None:
    worker.wants = False
    with role_of(worker) as role:
        step(role, Orders(), "one")
        settle(role)
    assert worker.log[:4] == ["bind", "load", "save", "clear"]


def test_what_ended_is_reported_once_and_counted(role: WorkerRole) -> None:
    step(role, Orders(loads=(Order("a", ((1,),)),)))
    assert wait_for(role).finished_recving == {"a"}
    assert not role.results()
    counts = role.take_counts()
    assert counts is not None
    # Every rank has the load: the scheduler counts it, once.
    assert counts == {"loaded_bytes": 100}
    assert role.take_counts() is None


def test_bytes_are_counted_until_they_are_told(role: WorkerRole) -> None:
    for name in "ab":
        step(role, Orders(loads=(Order(name, ((1,),)),)))
        assert wait_for(role).finished_recving == {name}
    counts = role.take_counts()
    assert counts is not None
    assert counts["loaded_bytes"] == 200


def test_bytes_are_counted_though_nothing_has_ended(
    role: WorkerRole, worker: Worker
) -> None:
    worker.saved_bytes = 50
    role._bridge.call(worker.callback)
    assert next_counts(role)["saved_bytes"] == 50


def next_counts(role: WorkerRole) -> dict[str, Any]:
    """Wait for what is to be counted."""
    while (counts := role.take_counts()) is None:
        assert not role.results()
        threading.Event().wait(0.001)
    return counts


def test_how_many_links_are_up_is_told_before_anything_ends(worker: Worker) -> None:
    worker.links = 2
    with role_of(worker) as role:
        assert next_counts(role)["gauges"] == {"test": {"links": 2}}


def test_how_many_links_are_up_is_told_when_it_changes(
    role: WorkerRole, worker: Worker
) -> None:
    for links in (2, 0):
        worker.links = links
        step(role, Orders(loads=(Order("a", ((1,),)),)))
        assert wait_for(role).finished_recving == {"a"}
        counts = role.take_counts()
        assert counts is not None
        assert counts["gauges"] == {"test": {"links": links}}
        assert role.take_counts() is None


def test_a_save_that_lasts_keeps_no_later_step_waiting(
    role: WorkerRole, worker: Worker
) -> None:
    step(role, Orders(saves=(Order("a"),)))
    step(role, Orders(loads=(Order("b", ((1,),)),)))
    assert wait_for(role).finished_recving == {"b"}
    role._bridge.call(worker.may_save.set)
    assert wait_for(role).finished_sending == {"a"}


def test_blocks_are_quiet_when_the_saves_of_steps_before_are_over(
    role: WorkerRole, worker: Worker
) -> None:
    step(role, Orders(saves=(Order("a"),)))
    wait_quiet_until(role, {"a", "stranger"}, worker.may_save.set)
    assert worker.may_save.is_set()
    assert wait_for(role).finished_sending == {"a"}


class SlowWorker(Worker):
    """Begins no load before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_load = asyncio.Event()

    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        await self.may_load.wait()


def test_blocks_are_not_quiet_before_the_saves_of_a_step_have_begun() -> None:
    worker = SlowWorker()
    with role_of(worker) as role:
        step(role, Orders(saves=(Order("a"),)))
        role._bridge.call(worker.may_save.set)
        wait_quiet_until(role, {"a"}, worker.may_load.set)
        assert worker.may_load.is_set()
        assert wait_for(role).finished_sending == {"a"}


def test_where_their_wait_fails_blocks_are_quiet_when_each_save_has_ended(
    role: WorkerRole, worker: Worker
) -> None:
    worker.is_losing_saves = True
    step(role, Orders(saves=(Order("a"), Order("b"))))
    step(role, Orders(saves=(Order("c"),)))
    settle(role)
    ended = KVTransferResults(finished_sending=frozenset("ab"))
    wait_quiet_until(role, {"a"}, worker._end, ended)
    assert role.results().finished_sending == {"a", "b"}


def test_blocks_of_a_save_that_was_refused_are_quiet(
    role: WorkerRole, worker: Worker
) -> None:
    worker.is_refusing = worker.is_losing_saves = True
    step(role, Orders(saves=(Order("a"),)))
    role.wait_released({"a"})
    assert wait_for(role).failed_sending == {"a"}


def test_nobody_waits_for_the_saves_of_others(role: WorkerRole, worker: Worker) -> None:
    step(role, Orders(saves=(Order("a"),)))
    settle(role)
    role.wait_released({"b"})
    role.wait_released(frozenset())
    assert not worker.may_save.is_set()


def test_nobody_is_asked_for_the_saves_of_others(
    role: WorkerRole, caplog: pytest.LogCaptureFixture
) -> None:
    step(role, Orders(saves=(Order("a"),)))
    settle(role)
    role.shutdown()  # nobody is there who could be asked
    role.wait_released({"b"})
    assert not caplog.messages


def test_what_was_saved_in_the_same_step_is_let_go_of_too() -> None:
    worker = HoldingWorker()
    with role_of(worker) as role:
        step(role, Orders(saves=(Order("a"), Order("b"))))
        step(role, Orders(saves=(Order("c"),)))
        role.wait_released({"a"})
        assert worker.wanted == [{"a", "b"}]


@pytest.mark.parametrize("reports_saves", [False, True])
def test_a_save_that_hangs_ends_no_engine(worker: Worker, reports_saves: bool) -> None:
    with role_of(worker, reports_saves=reports_saves, longest_save_s=0.01) as role:
        step(role, Orders(saves=(Order("a"),)))
        role.wait_released({"a"})
        assert not worker.may_save.is_set()
        settle(role)
        # What it has read must not be taken for KV, unless it is given up elsewhere.
        assert ("given up" in worker.log) is not reports_saves


def test_a_refused_save_is_not_waited_for(role: WorkerRole, worker: Worker) -> None:
    step(role, Orders(saves=(Order("a", refusal="too large"),)))
    role.wait_released({"a"})
    assert not worker.may_save.is_set()


def test_saves_of_whose_end_nobody_tells_keep_no_step_waiting(worker: Worker) -> None:
    with role_of(worker, reports_saves=False) as role:
        step(role, Orders(saves=(Order("b"),)))
        step(role, Orders(loads=(Order("a", ((1,),)),)))
        assert wait_for(role).finished_recving == {"a"}
        assert not worker.may_save.is_set()
        wait_quiet_until(role, {"b"}, worker.may_save.set)
        assert worker.may_save.is_set()


def test_nothing_is_asked_where_no_step_saves(role: WorkerRole, worker: Worker) -> None:
    worker.may_save.set()
    step(role, Orders(saves=(Order("a"),)))
    assert wait_for(role).finished_sending == {"a"}
    settle(role)
    role.shutdown()  # nobody is there who could be asked
    role.wait_released({"a"})


def test_a_step_that_is_refused_fails_its_loads_and_not_the_next_step(
    role: WorkerRole, worker: Worker
) -> None:
    worker.is_refusing = True
    step(role, Orders(loads=(Order("a", ((1, 2),)),), saves=(Order("b"),)))
    settle(role)
    ended = wait_for(role)
    assert ended.failed_recving == ended.finished_recving == {"a"}
    assert ended.invalid_block_ids == {1, 2}
    assert ended.failed_sending == ended.finished_sending == {"b"}
    assert ended.reasons == dict.fromkeys("ab", "RuntimeError: not now")
    settle(role)
    assert "load" not in worker.log
    worker.is_refusing = False
    step(role, Orders(loads=(Order("c", ((1,),)),)))
    assert wait_for(role).finished_recving == {"c"}


def test_loads_that_cannot_be_issued_fail_with_their_reason(
    role: WorkerRole, worker: Worker
) -> None:
    worker.is_failing = True
    step(role, Orders(loads=(Order("a", ((1, 2),)), Order("released"))))
    ended = wait_for(role)
    assert ended.failed_recving == ended.finished_recving == {"a"}
    assert ended.invalid_block_ids == {1, 2}
    assert ended.reasons == {"a": "ValueError: nobody thought of this"}
    assert role.take_counts() is None  # nothing was moved
    settle(role)
    worker.is_failing = False
    step(role, Orders(loads=(Order("b", ((1,),)),)))
    assert wait_for(role).finished_recving == {"b"}


class _OnGpu(Worker, SupportsStreams):
    """Notes whose stream was marked, and what came after which mark."""

    def __init__(self) -> None:
        super().__init__()
        self.markers: list[str] = []

    def mark_stream(self) -> object:
        self.markers.append(threading.current_thread().name)
        return len(self.markers)

    def follow(self, mark: object) -> None:
        self.log.append(f"after {mark}")


class _Failing(_OnGpu):
    def mark_stream(self) -> object:
        super().mark_stream()
        raise GPUFailed("an illegal access")


@pytest.mark.parametrize(
    ("kind", "marks"),
    [(_OnGpu, "123"), (_Failing, ["an illegal access"] * 3)],
    ids=["marked", "cannot be marked"],
)
def test_each_part_of_a_step_comes_after_a_mark_of_the_engines_own_stream(
    kind: type[_OnGpu], marks: Sequence[str]
) -> None:
    with role_of(worker := kind()) as role:
        worker.markers.clear()
        step(role, Orders(), "a")
        settle(role)
    first, second, third = (f"after {mark}" for mark in marks)
    assert worker.log[1:6] == [first, "a", second, "load", third]
    assert set(worker.markers) == {threading.current_thread().name}

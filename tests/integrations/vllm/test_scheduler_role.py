from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asynckv.abc import (
    AsksElsewhere,
    BlockIds,
    KVAnswer,
    KVConnectorHandshake,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorStep,
    KVQuestion,
    KVRequest,
    KVTransferResults,
    TakesHandshakes,
)
from asynckv.integrations.vllm.scheduler_role import SchedulerRole

MOVES = {"do_remote_decode": True}


@dataclasses.dataclass
class Request:
    """vLLM's, as far as it is looked at."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    status: Any = dataclasses.field(
        default_factory=lambda: SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    )


@dataclasses.dataclass
class New:
    req_id: str
    num_computed_tokens: int = 0


@dataclasses.dataclass
class Cached:
    req_ids: list[str] = dataclasses.field(default_factory=list)
    num_computed_tokens: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Output:
    """What vLLM's scheduler decided for one step."""

    num_scheduled_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    scheduled_new_reqs: list[New] = dataclasses.field(default_factory=list)
    scheduled_cached_reqs: Cached = dataclasses.field(default_factory=Cached)


class Save(msgspec.Struct, frozen=True):
    request_id: str
    refusal: str = ""


class Load(msgspec.Struct, frozen=True):
    request_id: str
    block_ids: BlockIds = ()


class Orders(KVConnectorMetadata, frozen=True):
    told: tuple[str, ...] = ()
    saves: tuple[Save, ...] = ()
    loads: tuple[Load, ...] = ()


class Connector(KVConnectorScheduler):
    """Saves what it is told of, believes everything, and notes it all."""

    def __init__(self) -> None:
        self.steps: list[KVConnectorStep] = []
        self.requests: list[KVRequest] = []
        self.params: dict[str, object] | None = {"do_remote_prefill": True}
        self.saves: tuple[Save, ...] = ()
        self.loads: tuple[Load, ...] = ()
        self.heard: list[KVTransferResults] = []
        self.finished: list[KVRequest] = []
        self.is_busy = False

    def on_new_request(self, request: KVRequest) -> None:
        self.requests.append(request)

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self.allocated = (request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, step: KVConnectorStep) -> KVConnectorMetadata:
        self.steps.append(step)
        told = tuple(one.request_id for one in step.scheduled)
        return Orders(told, self.saves, self.loads)

    def update_connector_output(self, results: KVTransferResults) -> KVTransferResults:
        self.heard.append(results)
        return KVTransferResults(
            finished_recving=results.finished_recving & {"known"},
            failed_recving=results.failed_recving & {"known"},
            reasons=results.reasons,
        )

    @property
    def last(self) -> KVTransferResults:
        """What it was told last."""
        return self.heard[-1]

    def request_finished(
        self, request: KVRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, object] | None]:
        self.finished.append(request)
        self.freed = block_ids
        return False, self.params

    def has_pending_work(self) -> bool:
        return self.is_busy

    def reset_cache(self) -> bool | None:
        return True

    def shutdown(self) -> None:
        self.is_down = True


@pytest.fixture
def connector() -> Connector:
    return Connector()


@pytest.fixture
def role(connector: Connector) -> Any:
    """Of any type: it is given fakes of vLLM's objects."""
    return SchedulerRole(connector, sees_all=False)


SENT = KVTransferResults(finished_sending=frozenset({"a"}))


def told(role: Any, name: str = "a", **given: Any) -> Request:
    """Return a request that moves, of which the role was told."""
    request = Request(name, [1, 2], MOVES, **given)
    role.on_new_request(request)
    return request


def saved(role: Any, connector: Connector) -> Request:
    """Return a request whose save is ordered."""
    request = told(role)
    connector.saves = (Save("a"),)
    role.orders(Output({"a": 2}, [New("a")]), blocks_of)
    return request


def blocks_of(request_id: str) -> list[list[int]]:
    return [[1, 2, 3]]


def test_a_request_that_carries_nothing_is_not_looked_at(
    role: Any, connector: Connector
) -> None:
    request = Request("a", [1, 2, 3])
    role.on_new_request(request)
    assert role.matched_tokens(request, 0) == (0, False)
    role.allocated(request, lambda: pytest.fail("its blocks were asked for"), 0)
    assert role.finished(request, [[1]]) == (False, None)
    assert connector.requests == []


def test_tokens_that_are_computed_already_are_not_matched(role: Any) -> None:
    request = Request("a", [1, 2, 3], MOVES)
    role.on_new_request(request)
    assert role.matched_tokens(request, 2) == (1, True)


def test_embeddings_are_not_moved_for_nothing_tells_two_of_them_apart(
    role: Any, connector: Connector
) -> None:
    role.on_new_request(Request("a", None, MOVES))
    role.on_new_request(Request("b", [0, 1], MOVES, prompt_embeds="of token 0"))
    assert connector.requests == []


def test_every_request_is_seen_where_a_store_may_have_it(connector: Connector) -> None:
    role: Any = SchedulerRole(connector, sees_all=True)
    role.on_new_request(Request("a", [1, 2]))
    assert [request.token_ids for request in connector.requests] == [(1, 2)]


@dataclasses.dataclass
class Lora:
    lora_name: str = "french"
    lora_path: str = "/loras/french"


@dataclasses.dataclass
class Place:
    offset: int = 0
    length: int = 4


@dataclasses.dataclass
class Feature:
    identifier: str = "cat.png"
    mm_position: Place = dataclasses.field(default_factory=Place)


def test_what_decides_on_kv_beside_tokens_is_in_the_salt(
    role: Any, connector: Connector
) -> None:
    for request in (
        Request("a", [1], MOVES),
        Request("b", [1], MOVES, cache_salt="tenant"),
        Request("c", [1], MOVES, lora_request=Lora()),
        Request("d", [1], MOVES, lora_request=Lora(lora_path="/loras/other")),
        Request("e", [1], MOVES, mm_features=[Feature()]),
        Request("f", [1], MOVES, mm_features=[Feature(mm_position=Place(1))]),
        Request("g", [1], MOVES, mm_features=[Feature(), Feature()]),
        Request("h", [1], MOVES, mm_features=[Feature(mm_position=Place(0, 5))]),
        Request("i", [1], MOVES, lora_request=Lora("cat.png", "0 4")),
    ):
        role.on_new_request(request)
    salts = [request.salt for request in connector.requests]
    assert salts[0] == ""
    assert len(set(salts)) == 9


@pytest.mark.parametrize(
    "salt",
    [
        *["\nlora french", "lora french", "lora 6 french", "french", "\ud800"],
        *["lora 6 frenchpath 13 /loras/french", "salt 0 lora 6 french", "\0"],
        '["lora","french"]',
    ],
)
def test_no_salt_that_a_client_may_choose_makes_kv_that_of_others(
    role: Any, connector: Connector, salt: str
) -> None:
    role.on_new_request(Request("a", [1], MOVES, cache_salt=salt))
    role.on_new_request(Request("b", [1], MOVES, lora_request=Lora()))
    role.on_new_request(Request("c", [1], MOVES, cache_salt=salt, lora_request=Lora()))
    role.on_new_request(
        Request("d", [1], MOVES, mm_features=[Feature("lora 6 french")])
    )
    taken = connector.requests[1].salt
    role.on_new_request(Request("e", [1], MOVES, cache_salt=taken))
    assert len({request.salt for request in connector.requests}) == 5


def test_a_prompt_is_told_of_until_its_last_chunk(
    role: Any, connector: Connector
) -> None:
    role.on_new_request(Request("a", list(range(100)), MOVES))
    first = Output({"a": 64}, [New("a")])
    second = Output({"a": 36}, scheduled_cached_reqs=Cached(["a"], [64]))
    third = Output({"a": 1}, scheduled_cached_reqs=Cached(["a"], [100]))
    orders = [role.orders(output, blocks_of) for output in (first, second, third)]
    assert orders == [Orders(("a",)), Orders(("a",)), None]
    told = [step.scheduled for step in connector.steps]
    assert [len(some) for some in told] == [1, 1, 0]
    assert told[1][0].num_computed_tokens == 64
    assert told[1][0].block_ids == ((1, 2, 3),)


def test_a_preempted_prompt_is_told_of_again(role: Any) -> None:
    told(role)
    role.orders(Output({"a": 2}, [New("a")]), blocks_of)
    assert not role.overwritten({"a", "stranger"})
    both = Cached(["a", "stranger"], [0, 0])
    again = Output({"a": 2, "stranger": 2}, scheduled_cached_reqs=both)
    assert role.orders(again, blocks_of) == Orders(("a",))


def test_blocks_that_a_save_may_read_are_not_to_be_overwritten(
    role: Any, connector: Connector
) -> None:
    for name in ("a", "b"):
        told(role, name)
    connector.saves = (Save("a"),)
    role.orders(Output({"a": 2, "b": 2}, [New("a"), New("b")]), blocks_of)
    assert not role.overwritten({"b"})
    assert role.overwritten({"a", "b"}) == {"a"}
    role.apply_results(SENT, SENT)
    assert not role.overwritten({"a", "b"})


def test_blocks_of_a_saved_request_are_held_until_it_is_sent(
    role: Any, connector: Connector
) -> None:
    request = saved(role, connector)
    assert role.finished(request, [[1]]) == (True, {"do_remote_prefill": True})
    assert role.has_pending_work()
    assert role.apply_results(SENT, SENT) == ({"a"}, set())
    assert role.apply_results(SENT, SENT) == (set(), set())
    assert role.dropped == 1
    assert not role.has_pending_work()


def test_a_save_that_ended_before_its_request_holds_nothing(
    role: Any, connector: Connector
) -> None:
    request = saved(role, connector)
    assert role.apply_results(SENT, SENT) == (set(), set())
    assert role.dropped == 0
    assert role.finished(request, [[1]]) == (False, {"do_remote_prefill": True})


def test_a_save_cannot_have_ended_before_it_was_ordered(
    role: Any, connector: Connector
) -> None:
    told(role)
    assert role.apply_results(SENT, SENT) == (set(), set())
    assert role.dropped == 1
    request = saved(role, connector)
    assert role.finished(request, [[1]])[0]


def test_a_request_whose_save_failed_carries_nothing(
    role: Any, connector: Connector
) -> None:
    request = told(role)
    connector.params = None
    assert role.finished(request, [[1]]) == (False, None)
    assert connector.freed == ((1,),)


def test_a_request_that_is_finished_is_forgotten(role: Any) -> None:
    request = told(role)
    role.finished(request, [[1]])
    assert role.matched_tokens(request, 0) == (0, False)
    assert role.orders(Output({"a": 2}, [New("a")]), blocks_of) is None


class Told(Connector, TakesHandshakes):
    def set_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshake]
    ) -> None:
        self.told = metadata


def test_what_workers_told_reaches_a_connector_that_takes_it(role: Any) -> None:
    metadata = {0: KVConnectorHandshake(0, "incarnation")}
    connector = Told()
    SchedulerRole(connector, sees_all=False).take_handshakes(metadata)
    assert connector.told == metadata
    role.take_handshakes(metadata)  # of another kind, which is told nothing


def test_a_connector_says_what_it_does_and_is_shut_down_with_its_role(
    role: Any, connector: Connector
) -> None:
    assert not role.has_pending_work()
    connector.is_busy = True
    assert role.has_pending_work()
    assert role.reset_cache() is True
    role.shutdown()
    assert connector.is_down


def test_blocks_are_held_while_one_rank_saves_though_another_has_failed(
    role: Any, connector: Connector
) -> None:
    request = saved(role, connector)
    connector.params = None
    assert role.finished(request, [[1]]) == (True, None)
    assert role.apply_results(SENT, SENT) == ({"a"}, set())


def test_a_save_that_is_refused_holds_nothing(role: Any, connector: Connector) -> None:
    request = told(role)
    connector.saves, connector.params = (Save("a", "too large"),), None
    role.orders(Output({"a": 2}, [New("a")]), blocks_of)
    assert not role.overwritten({"a"})
    assert role.finished(request, [[1]]) == (False, None)


def test_what_a_save_reads_is_waited_for_where_it_is_not_held(
    connector: Connector,
) -> None:
    role: Any = SchedulerRole(connector, sees_all=True, reports_saves=False)
    request = saved(role, connector)
    assert role.overwritten(set()) == set()
    assert role.overwritten({"a", "stranger"}) == {"a"}
    assert not role.finished(request, [[1]])[0]
    assert role.overwritten(set()) == {"a"}
    assert role.overwritten({"a"}) == set()


def test_only_completions_that_the_connector_knows_reach_vllm(role: Any) -> None:
    received = frozenset({"known", "late"})
    results = KVTransferResults(finished_recving=received)
    assert role.apply_results(results, results) == (set(), {"known"})
    assert role.dropped == 1


def ends(*names: str, failed: bool = False) -> KVTransferResults:
    ids = frozenset(names)
    lost = ids if failed else frozenset()
    why = dict.fromkeys(lost, "another model")
    return KVTransferResults(finished_recving=ids, failed_recving=lost, reasons=why)


def test_what_one_rank_says_of_its_failure_is_kept_until_all_have_ended(
    role: Any, connector: Connector, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = KVTransferResults()
    assert role.apply_results(nothing, ends("known", failed=True)) == (set(), set())
    assert role.apply_results(ends("known"), ends("known")) == (set(), {"known"})
    assert connector.last.failed_recving == {"known"}
    assert connector.last.reasons == {"known": "another model"}
    assert "the KV of known did not come: another model" in caplog.text
    counts = role.take_counts()
    assert counts == {"failed_loads": 1}
    role.apply_results(ends("known"), ends("known"))
    assert connector.last.failed_recving == frozenset()


def test_a_failed_save_is_one_when_no_rank_reads_any_more(
    role: Any, connector: Connector, caplog: pytest.LogCaptureFixture
) -> None:
    request = saved(role, connector)
    failed = KVTransferResults(
        finished_sending=SENT.finished_sending,
        failed_sending=SENT.finished_sending,
        full_sending=SENT.finished_sending,
        reasons={"a": "no room"},
    )
    role.apply_results(ends("known"), ends("known") | failed)
    assert connector.last.failed_sending == frozenset()
    assert connector.last.full_sending == frozenset()
    assert role.finished(request, [[1]])[0]
    assert role.apply_results(SENT, SENT) == ({"a"}, set())
    assert connector.last.failed_sending == {"a"}
    assert connector.last.full_sending == {"a"}
    counts = role.take_counts()
    assert counts["failed_saves"] == 1 and "saves" not in counts
    role.apply_results(SENT, SENT)
    assert connector.last.failed_sending == frozenset()
    assert "the KV of a was not saved: no room" in caplog.text


def test_the_ends_of_another_connector_are_left_alone(
    role: Any, connector: Connector
) -> None:
    saved(role, connector)
    theirs = KVTransferResults(
        finished_sending=frozenset({"x", "y"}), finished_recving=frozenset({"z"})
    )
    assert role.apply_results(theirs, KVTransferResults()) == ({"x", "y"}, {"z"})
    assert role.apply_results(theirs | ends("known"), ends("known")) == (
        {"x", "y"},
        {"z", "known"},
    )
    assert role.dropped == 0
    connector.loads = (Load("known", ((1,),)),)
    role.orders(Output(), blocks_of)
    role.apply_results(ends("known"), KVTransferResults())  # nobody else loads for it
    assert connector.last.finished_recving == {"known"}
    role.apply_results(ends("known"), KVTransferResults())  # nor here, any more
    assert connector.last.finished_recving == frozenset()
    assert not any("z" in said.finished_recving for said in connector.heard)


def test_a_request_that_only_releases_may_be_loaded_by_another_connector(
    role: Any, connector: Connector
) -> None:
    connector.loads = (Load("released"),)
    role.orders(Output(), blocks_of)
    theirs = ends("released")
    assert role.apply_results(theirs, KVTransferResults()) == (set(), {"released"})
    assert connector.last == KVTransferResults()


def test_requests_are_counted_once_whatever_the_number_of_ranks(
    role: Any, connector: Connector
) -> None:
    saved(role, connector)
    connector.saves = (Save("b", "too large"),)
    connector.loads = (Load("known", ((1,),)), Load("released"))
    role.orders(Output(), blocks_of)
    role.apply_results(KVTransferResults(), ends("known") | SENT)  # one of two ranks
    assert role.take_counts()["failed_saves"] == 1
    role.apply_results(ends("known") | SENT, ends("known") | SENT)
    counts = role.take_counts()
    (seconds,) = counts.pop("load_seconds")
    assert counts == {"loads": 1, "saves": 1}
    assert 0 <= seconds < 60
    role.apply_results(ends("known"), ends("known") | SENT)
    assert role.take_counts()["loads"] == 1
    assert role.take_counts() is None


class Asking(Connector, AsksElsewhere):
    """Asks on its loop how much there is of a prompt."""

    is_failing = False
    is_reachable: bool | None = None

    def statistics(self) -> object:
        return self

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[KVQuestion] = []
        self.answers: dict[str, int] = {}
        self.is_asked = threading.Event()
        self.log: list[str] = []

    async def start(self) -> None:
        self.log.append("started")

    def get_num_new_matched_tokens(
        self, request: KVRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.request_id not in self.answers:
            if "asked" not in self.log:
                self.log.append("asked")
                self.questions.append(KVQuestion(request.request_id, ("key",)))
            return None, False
        return self.answers[request.request_id], True

    def take_questions(self) -> tuple[KVQuestion, ...]:
        questions, self.questions = tuple(self.questions), []
        return questions

    async def ask(self, question: KVQuestion) -> KVAnswer:
        self.is_asked.set()
        if self.is_failing:
            raise ValueError("an error that nobody thought of")
        return KVAnswer(question.request_id, 32)

    def take_answer(self, answer: KVAnswer) -> None:
        self.answers[answer.request_id] = answer.num_keys

    async def aclose(self) -> None:
        self.log.append("closed")

    def abort(self) -> None:
        raise NotImplementedError


@pytest.fixture
def asking() -> Asking:
    return Asking()


@pytest.fixture
def asker(asking: Asking) -> Iterator[Any]:
    role = SchedulerRole(asking, sees_all=True)
    yield role
    role.shutdown()


LONG = Request("a", list(range(40)))


def step_of_nothing(role: Any) -> None:
    """Take a step, by which what was not asked yet is asked."""
    assert role.orders(Output(), blocks_of) is None


@pytest.mark.parametrize(("is_failing", "found"), [(False, 32), (True, 0)])
def test_what_has_to_be_asked_elsewhere_is_asked_again_until_it_is_known(
    asker: Any, asking: Asking, is_failing: bool, found: int
) -> None:
    asking.is_failing = is_failing
    asker.on_new_request(LONG)
    assert asker.matched_tokens(LONG, 0) == (None, False)
    assert not asking.is_asked.is_set()  # but with all that this step has to ask
    step_of_nothing(asker)
    assert asking.is_asked.wait(5)
    deadline = time.monotonic() + 5
    while (answer := asker.matched_tokens(LONG, 0)) == (None, False):
        assert time.monotonic() < deadline
    assert answer == (found, True)
    for _ in range(2):
        asker.shutdown()
    assert asking.log == ["started", "asked", "closed"]


def test_whether_the_store_answers_is_told_when_it_changes(
    asker: Any, asking: Asking
) -> None:
    for is_reachable in (True, False):
        asking.is_reachable = is_reachable
        asking.questions = [KVQuestion("a", ("key",))]
        step_of_nothing(asker)
        gauges = {"scheduler": {"store_reachable": int(is_reachable)}}
        assert next_counts(asker) == {"gauges": gauges}
        assert asker.take_counts() is None


def next_counts(role: Any) -> Any:
    deadline = time.monotonic() + 5
    while (counts := role.take_counts()) is None:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)
    return counts


@pytest.mark.parametrize("between", ["", " "])
def test_no_salt_a_client_chooses_is_anothers_adapter(
    role: Any, connector: Connector, between: str
) -> None:
    lora = SimpleNamespace(lora_name="y", lora_path="z")
    forged = f"xlora{between}ypath{between}z"
    role.on_new_request(Request("a", [1], MOVES, cache_salt="x", lora_request=lora))
    role.on_new_request(Request("b", [1], MOVES, cache_salt=forged))
    one, other = connector.requests
    assert one.salt and other.salt and one.salt != other.salt


def test_failures_of_what_never_ends_are_not_kept_for_ever(
    role: Any, connector: Connector
) -> None:
    nothing = KVTransferResults()
    names = [f"r{number}" for number in range(5000)]
    for name in names:
        said = KVTransferResults(failed_recving=frozenset({name}))
        role.apply_results(nothing, said)
    ended = KVTransferResults(finished_recving=frozenset({names[0], names[-1]}))
    role.apply_results(ended, ended)
    assert connector.last.failed_recving == {names[-1]}


@pytest.mark.parametrize(
    ("status", "is_aborted"),
    [("FINISHED_STOPPED", False), ("FINISHED_ABORTED", True), ("FINISHED_ERROR", True)],
)
def test_a_request_that_ends_without_an_answer_is_aborted(
    role: Any, connector: Connector, status: str, is_aborted: bool
) -> None:
    request = saved(role, connector)
    request.status = SimpleNamespace(name=status)
    role.finished(request, [[1]])
    assert [one.is_aborted for one in connector.finished] == [is_aborted]


@pytest.mark.parametrize(
    ("request_id", "parent_id"),
    [("2_cmpl-a_b", "cmpl-a_b"), ("cmpl-2_b", ""), ("_a", ""), ("7", "")],
)
def test_a_sample_says_of_which_request_it_is_one(
    role: Any, connector: Connector, request_id: str, parent_id: str
) -> None:
    told(role, request_id)
    assert [one.parent_id for one in connector.requests] == [parent_id]


def test_blocks_are_told_with_the_request_and_how_many_tokens_come(
    role: Any, connector: Connector
) -> None:
    request = Request("a", [1, 2, 3], MOVES)
    role.on_new_request(request)
    role.allocated(request, lambda: [[4, 5]], 2)
    told, blocks, count = connector.allocated
    assert (told, blocks, count) == ("a", ((4, 5),), 2)


def test_an_end_of_a_save_that_only_its_blocks_tell_of_is_ours(
    role: Any, connector: Connector
) -> None:
    request = saved(role, connector)
    role.apply_results(SENT, KVTransferResults())
    assert connector.last.finished_sending == {"a"}
    assert role.finished(request, [[1]])[0] is False
    again = told(role)
    role.orders(Output({"a": 2}, [New("a")]), blocks_of)
    assert role.finished(again, [[1]])[0] is True
    assert role.apply_results(SENT, KVTransferResults())[0] == {"a"}
    assert not role.has_pending_work()

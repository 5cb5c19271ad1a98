from __future__ import annotations

from asynckv.parallel.aggregator import Ends, KVConnectorOutput


def received(*names: str) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving={*names})


def inside(one: KVConnectorOutput, *before: KVConnectorOutput) -> KVConnectorOutput:
    return KVConnectorOutput(parts=(*before, one))


def test_connectors_in_connectors_are_counted_apart_too() -> None:
    ends = Ends(8)
    deep = inside(inside(received("a")))
    ends.take(0, deep, expected=2, now_s=0)
    nothing = ends.take(1, inside(received("a")), expected=2, now_s=0)
    assert not nothing.finished_recving
    ended = ends.take(1, deep, expected=2, now_s=0)
    assert ended.finished_recving == {"a"}
    assert ended.parts[0].parts[0].finished_recving == {"a"}
    assert (ends.unfinished, ends.late, ends.duplicates) == (1, 0, 0)


def test_what_is_complete_is_forgotten_in_each_connector() -> None:
    ends = Ends(8)
    for _ in range(2):
        ended = ends.take(0, inside(received("a")), expected=1, now_s=0)
        assert ended.finished_recving == {"a"}
        ends.forget(["a"])
    assert ends.late == 0


def test_of_what_is_over_only_the_last_are_remembered() -> None:
    ends = Ends(8)
    for number in range(9):
        ends.take(0, received(f"r{number}"), expected=1, now_s=0)
    assert not ends.take(0, received("r8", "r1"), expected=1, now_s=0).finished_recving
    again = ends.take(0, received("r0"), expected=1, now_s=0)
    assert again.finished_recving == {"r0"}


def test_of_failures_without_an_end_only_the_last_are_remembered() -> None:
    ends, names = Ends(8), {f"r{number}" for number in range(9)}
    for name in sorted(names):
        ends.note_failures(KVConnectorOutput(failed_recving={name}))
    ended = ends.take(0, received(*names), expected=1, now_s=0)
    assert ended.failed_recving == names - {"r0"}

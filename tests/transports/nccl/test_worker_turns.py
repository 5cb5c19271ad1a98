from __future__ import annotations

from asynckv.transports.nccl.worker import WorkerTurns


def test_the_first_has_its_turn_at_once_and_the_others_in_line() -> None:
    turns, begun = WorkerTurns(), list[int]()
    first = turns.ask(lambda: begun.append(1))
    second = turns.ask(lambda: begun.append(2))
    turns.ask(lambda: begun.append(3))
    assert begun == [1]
    turns.end(first)
    turns.end(second)
    assert begun == [1, 2, 3]


def test_who_does_not_want_it_any_more_is_passed_over() -> None:
    turns, begun = WorkerTurns(), list[int]()
    first = turns.ask(lambda: begun.append(1))
    turns.end(turns.ask(lambda: begun.append(2)))
    turns.end(first)
    turns.end(first)
    assert begun == [1]
    assert turns.count == 0

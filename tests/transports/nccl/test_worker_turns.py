from __future__ import annotations

from functools import partial

from asynckv.transports.nccl.worker import WorkerTurns


def test_the_first_has_its_turn_at_once_and_the_others_in_line() -> None:
    turns, begun = WorkerTurns(), list[int]()
    first, second, third = (partial(begun.append, number) for number in (1, 2, 3))
    for begin in (first, second, third):
        turns.ask(begin)
    assert begun == [1]
    turns.end(first)
    turns.end(second)
    assert begun == [1, 2, 3]


def test_who_does_not_want_it_any_more_is_passed_over() -> None:
    turns, begun = WorkerTurns(), list[int]()
    first, second = partial(begun.append, 1), partial(begun.append, 2)
    turns.ask(first)
    turns.ask(second)
    turns.end(second)
    turns.end(first)
    turns.end(first)
    assert begun == [1]
    assert turns.count == 0

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from asynckv.cli.demo.messages import (
    Answered,
    Ask,
    FillBuffer,
    Filled,
    KeptEntry,
    Landed,
    Load,
    Note,
    Order,
    Prefill,
    Progress,
    ReadBack,
    Sampled,
    SelectSlowly,
    Text,
    WaitReturned,
    decode_note,
    decode_order,
    encode_line,
)
from asynckv.cli.demo.processes import Worker, WorkerEnded, WorkerFailed
from asynckv.cli.demo.report import BackpressureSample

# Of the package it has the messages alone: a stage imports torch, which takes seconds.
ECHO = """
import sys
from asynckv.cli.demo.messages import *

def say(note):
    sys.stdout.buffer.write(encode_line(note))
    sys.stdout.flush()

for line in sys.stdin.buffer:
    match decode_order(line):
        case ReadBack(tokens):
            print("not a note", file=sys.stderr)
            say(Landed(len(tokens)))
            say(Text(str(sum(tokens))))
        case WaitReturned():
            say(Failed("LookupError: nothing is kept"))
        case FillBuffer():
            sys.exit("last words")
"""


@pytest.fixture
async def worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Worker]:
    """Return a worker that adds tokens up."""
    (tmp_path / "echo_worker.py").write_text(ECHO, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    worker = await Worker.start("echo_worker", progress=lambda _: None)
    yield worker
    await worker.stop()


@pytest.mark.multiprocess
async def test_a_worker_answers_and_its_words_beside_do_no_harm(
    worker: Worker,
) -> None:
    assert await worker.ask(ReadBack((1, 2)), Text) == Text("3")
    assert await worker.ask(ReadBack((3,)), Text) == Text("3")


@pytest.mark.multiprocess
async def test_progress_is_told_before_the_answer(worker: Worker) -> None:
    told: list[Progress] = []
    worker.progress = told.append
    await worker.ask(ReadBack((1, 2)), Text)
    assert told == [Landed(2)]


@pytest.mark.multiprocess
async def test_what_a_worker_cannot_do_is_raised_here(worker: Worker) -> None:
    with pytest.raises(WorkerFailed, match="LookupError: nothing is kept"):
        await worker.ask(WaitReturned(), KeptEntry)


@pytest.mark.multiprocess
async def test_a_worker_that_dies_is_noticed(worker: Worker) -> None:
    with pytest.raises(WorkerEnded, match="(?s)status 1.*last words"):
        await worker.ask(FillBuffer(("a",)), Filled)


@pytest.mark.multiprocess
async def test_a_killed_worker_answers_nothing_any_more(worker: Worker) -> None:
    worker.kill()
    with pytest.raises(WorkerEnded, match="status -9"):
        await worker.expect(Text)
    with pytest.raises(WorkerEnded, match="status -9"):
        await worker.ask(ReadBack((1,)), Text)


@pytest.mark.multiprocess
async def test_stopping_twice_is_once(worker: Worker) -> None:
    await worker.stop()
    await worker.stop()


@pytest.mark.multiprocess
async def test_a_cancelled_question_can_be_asked_again(worker: Worker) -> None:
    asking = asyncio.create_task(worker.ask(ReadBack((1,)), Text))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    assert (await worker.ask(ReadBack((5,)), Text)).text in {"1", "5"}


ORDERS = [
    Prefill("layerwise", "a"),
    Load("/folder", "tcp://here", (1, 2), (1, 3), 10),
    SelectSlowly(3, 0.5),
    Ask(("one", "two"), 3, "a document"),
]
NOTES = [
    Landed(4),
    Text("two\nlines"),
    Answered(9, 4, 5, {"disk": 1}, 0.5, (1, 2), "text"),
    Sampled(BackpressureSample(1.5, 2, 3, 4), 5),
]


@pytest.mark.parametrize(
    ("message", "decode"),
    [
        *((order, decode_order) for order in ORDERS),
        *((note, decode_note) for note in NOTES),
    ],
)
def test_what_is_said_survives_its_line(
    message: Order | Note, decode: Callable[[bytes], Order | Note]
) -> None:
    line = encode_line(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_a_note_is_no_order() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_order(encode_line(Landed(4)))

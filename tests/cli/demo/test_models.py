from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from asynckv.cli.demo.models import (
    ByteTokenizer,
    check_model,
    load_model,
    loading,
    prepare_model,
    read_prompt,
)
from asynckv.errors import ConfigError


def test_a_byte_tokenizer_gives_text_back() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode_prompt("Fer", "row")) == "Ferrow"


def test_a_byte_tokenizer_cuts_a_long_prompt() -> None:
    tokens = ByteTokenizer(max_tokens=5).encode_prompt("a long prompt", "?!")
    assert bytes(tokens) == b"a l?!"


def test_a_byte_tokenizer_cuts_document_and_turns_of_a_chat_each() -> None:
    tokens = ByteTokenizer(max_tokens=64).encode_chat(("Hello", "Hi"), 99 * "d")
    assert bytes(tokens) == 56 * b"d" + b"Hell\nHi"


def test_bytes_that_are_no_text_show_as_dots() -> None:
    assert ByteTokenizer().decode([72, 105, 7]) == "Hi."


def test_a_random_model_is_the_same_wherever_it_is_loaded(tmp_path: Path) -> None:
    prepared = prepare_model("random-tiny", tmp_path)
    first, second = load_model(prepared.folder), load_model(prepared.folder)
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    prepare_model("random-tiny", tmp_path)
    with pytest.raises(ConfigError, match="tokenizer"):
        prepare_model(str(tmp_path), tmp_path / "scratch")


def test_what_is_no_model_is_refused_with_what_would_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config.json"):
        check_model(str(tmp_path / "nowhere"))


def test_preparing_says_what_it_does(tmp_path: Path) -> None:
    done: list[str] = []
    prepared = prepare_model("random-tiny", tmp_path, done.append)
    load_model(prepared.folder, on_progress=done.append)
    assert done[0] == "making a random model"
    assert done[1].endswith("MB of weights")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_wheel_s_model_speaks(tmp_path: Path) -> None:
    prepared = prepare_model("smollm2", tmp_path)
    question = "What is the capital of France?"
    tokens = prepared.tokenizer.encode_prompt(question, "")
    chat = prepared.tokenizer.encode_chat((question, "Paris", "And of Spain?"))
    assert chat[: len(tokens)] == tokens  # a turn begins with the one before
    assert prepare_model("smollm2", tmp_path).folder == tmp_path  # it is there already
    model = load_model(prepared.folder)
    ids = torch.tensor([tokens])
    new = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]  # type: ignore[operator]
    assert "Paris" in prepared.tokenizer.decode(new.tolist())


def test_what_was_loaded_is_never_collected_again() -> None:
    before = gc.get_freeze_count()
    try:
        with loading():
            collects_meanwhile = gc.isenabled()
        assert not collects_meanwhile
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_the_shipped_prompt_is_a_story_and_two_questions_about_it() -> None:
    prompt = read_prompt()
    assert prompt.document.startswith("The Two Kitchens of Ferrow")
    assert prompt.question == "Explain what Ansa did."
    assert prompt.second_question.endswith("?")
    assert len(prompt.document.split()) > 1300  # more than 1,500 tokens for SmolLM2


def test_a_file_of_one_s_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("  Größe\n", encoding="utf-8")
    assert read_prompt(path).document == "Größe"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b" \n", r"mine\.txt holds no text"),
        (b"\x89PNG\r\n", r"mine\.txt is no text in UTF-8"),
        (b"a\0b", r"mine\.txt holds no text"),
        (None, r"cannot read the prompt .*mine\.txt: No such file"),
    ],
    ids=["empty", "a picture", "zeros", "missing"],
)
def test_what_is_no_text_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_prompt(path)

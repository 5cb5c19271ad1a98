from __future__ import annotations

from pathlib import Path

import pytest

from asynckv.cli.demo.models import read_prompt


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

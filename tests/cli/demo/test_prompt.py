from __future__ import annotations

from pathlib import Path

import pytest

from asynckv.cli.demo.prompt import read_prompt


def test_the_shipped_prompt_is_a_story_and_a_task() -> None:
    prompt = read_prompt()
    assert prompt.startswith("The Two Kitchens of Ferrow")
    assert prompt.endswith("Explain what Ansa did.")
    assert len(prompt.split()) > 1300  # SmolLM2 makes more than 1,500 tokens of it


def test_a_file_of_one_s_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("  Größe\n", encoding="utf-8")
    assert read_prompt(path) == "Größe"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(" \n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"empty\.txt holds no text"):
        read_prompt(path)

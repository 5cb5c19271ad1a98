"""The prompt: the story that ships with the demo, or the user's own file."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

__all__ = ("read_prompt",)


def read_prompt(path: Path | None = None) -> str:
    """Return the text of ``path``, or the shipped story and a task about it.

    :raises OSError: if ``path`` cannot be read
    :raises ValueError: if it holds no text
    """
    if path is None:
        folder = importlib.resources.files(__package__)
        story = folder.joinpath("prompt.txt").read_text(encoding="utf-8")
        task = folder.joinpath("task.txt").read_text(encoding="utf-8")
        return f"{story}\n{task}".strip()
    text = path.read_text(encoding="utf-8").strip()
    if not text:
        raise ValueError(f"{path} holds no text")
    return text

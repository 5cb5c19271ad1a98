"""What is asked: a document and two questions about it.

The document is the story that ships with the demo, or the user's own file.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import msgspec

__all__ = ("DemoPrompt", "read_prompt")

_SECOND_OF_THE_STORY = "Who was Old Pell?"
_SECOND_OF_A_FILE = "Say what matters most in one sentence."


class DemoPrompt(msgspec.Struct, frozen=True):
    """Both prompts are the document and a question; so they begin alike."""

    document: str
    question: str
    second_question: str


def read_prompt(path: Path | None = None) -> DemoPrompt:
    """Read the text of ``path``, or the shipped story and a task about it.

    :raises ValueError: ``path`` is not there, cannot be read, or holds no text
    """
    if path is None:
        folder = importlib.resources.files(__package__)
        story = folder.joinpath("prompt.txt").read_text(encoding="utf-8")
        task = folder.joinpath("task.txt").read_text(encoding="utf-8")
        return DemoPrompt(story.strip(), task.strip(), _SECOND_OF_THE_STORY)
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise ValueError(f"cannot read the prompt {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ValueError(f"the prompt {path} is no text in UTF-8") from exc
    if not text or "\0" in text:
        raise ValueError(f"the prompt {path} holds no text")
    return DemoPrompt(text, "", _SECOND_OF_A_FILE)

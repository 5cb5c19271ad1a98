"""A self-contained HTML document: nothing in it is fetched from anywhere.

Its pictures are SVG, as wide as the window: only places scale, letters never do.
Horizontal places are percentages of the picture; colours are those of its style.
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from asynckv.errors import ConfigError

__all__ = (
    "check_writable",
    "draw_line",
    "draw_rect",
    "draw_text",
    "picture_of",
    "write_document",
    "write_head",
    "write_numbers",
    "write_section",
    "write_verdict",
)


def check_writable(path: Path) -> None:
    """Make sure, before long work, that a file can be written to ``path``.

    Nothing is created. What changes meanwhile is not foreseen.

    :raises ConfigError: its folder is not there, or it may not be written
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder", hint="name a file")
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied")


def write_head(title: str, *facts: str) -> str:
    """Return the heading of the whole document, and a line of each of the facts."""
    lines = (f'<p class="facts">{escape(fact)}</p>' for fact in facts)
    return "\n".join((f"<h1>{escape(title)}</h1>", *lines))


def write_section(title: str, note: str, *parts: str) -> str:
    """Return a section of the document: what to know of it, then its parts."""
    head = f"<h2>{escape(title)}</h2>"
    return "\n".join((head, f'<p class="note">{escape(note)}</p>', *parts))


def write_verdict(is_same: bool, same: str, problems: Sequence[str]) -> str:
    """Return whether tokens were the ``same``, as it is said, and what went wrong."""
    words = same if is_same else "tokens differ"
    if is_same and problems:
        words += ", but something else went wrong"
    listed = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    listed = f'<ul class="problems">{listed}</ul>' if problems else ""
    kind = "verdict" if is_same and not problems else "verdict bad"
    return f'<p class="{kind}" id="verdict">{words}</p>{listed}'


def write_numbers(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return the table of names, values and remarks."""
    rows = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="value">{escape(value)}</td>'
        f'<td class="remark">{escape(remark)}</td></tr>'
        for name, value, remark in figures
    )
    table = f'<table id="numbers">\n<tbody>\n{rows}\n</tbody>\n</table>'
    return f"<h2>The numbers</h2>\n{table}"


def write_document(title: str, package: str, body: str) -> str:
    """Return the whole file: ``body`` as it is, in the style of a package.

    That is the ``page.css`` beside its modules, after the style of all documents.
    """
    files = importlib.resources.files
    styles = files(__package__) / "document.css", files(package) / "page.css"
    style = "".join(file.read_text(encoding="utf-8") for file in styles)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def picture_of(height: float, title: str, parts: Iterable[str]) -> str:
    """Return an SVG picture of what was drawn."""
    label = f'role="img" aria-label="{escape(title)}"'
    return f'<svg height="{round(height)}" {label}>{"".join(parts)}</svg>'


def draw_line(kind: str, one: tuple[float, float], other: tuple[float, float]) -> str:
    """Return a line of a class of the style, from one place to another."""
    (x1, y1), (x2, y2) = one, other
    place = f'x1="{x1}%" y1="{round(y1, 2)}" x2="{x2}%" y2="{round(y2, 2)}"'
    return f'<line class="{kind}" {place}/>'


def draw_rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    """Return a filled rectangle."""
    place = f'x="{round(x, 3)}%" y="{round(y, 2)}"'
    size = f'width="{width}%" height="{round(height, 2)}"'
    return f'<rect class="{kind}" {place} {size}/>'


def draw_text(
    kind: str, x: float, y: float, words: str, anchor: str = "end", dx: int = 0
) -> str:
    """Return words that begin, end, or have their ``"middle"`` at a place."""
    place = f'x="{round(x, 3)}%" y="{round(y, 2)}" dx="{dx}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(words)}</text>'

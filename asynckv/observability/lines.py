"""Words of others in our log and our errors: one line each, and nothing hidden."""

from __future__ import annotations

__all__ = ("as_line",)


def as_line(text: str, *, max_chars: int | None = None) -> str:
    """Return ``text`` with all escaped that is not seen or would not stay in line.

    So nobody can end a line of a log and write the next one, or command the
    terminal that shows it. At most ``max_chars`` of ``text`` are kept.
    """
    text = text[:max_chars]
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )

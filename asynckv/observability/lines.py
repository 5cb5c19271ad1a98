"""Words of others in our log and our errors: one line each, and nothing hidden.

But for passwords: those are not shown to anybody.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ("as_line", "redacted", "without_passwords", "without_secrets")

_HIDDEN: Final = "***"
_PASSWORD: Final = re.compile(r"//[^/?#@:]*:([^/?#]+)@")
_UNESCAPED_PASSWORD: Final = re.compile(r"(://[^@:]*):(.+)@", re.DOTALL)
"""Up to the last ``@``: a ``/``, ``?`` or ``#`` in a password ends it for others."""
_SECRET_NAME: Final = re.compile(r"pass|secret|token|key|auth|sig|cred", re.IGNORECASE)


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


def redacted(url: str) -> str:
    """Return ``url`` for a log: without its password, and what else may be secret."""
    return as_line(without_secrets(url, url))


def without_passwords(text: str) -> str:
    """Return ``text`` without what may be a password of an URL in it."""
    return _UNESCAPED_PASSWORD.sub(rf"\1:{_HIDDEN}@", text)


def without_secrets(text: str, url: str) -> str:
    """Return ``text``, which may quote ``url``, without what is secret in that.

    That is its password, and what its query says of a key, a token and the like.
    """
    base, _, query = url.partition("?")
    pairs = [pair.partition("=") for pair in query.split("&")]
    secret = [pair for pair in pairs if pair[2] and _SECRET_NAME.search(pair[0])]
    unescaped = _UNESCAPED_PASSWORD.search(url)
    if unescaped is not None:
        if any("@" in value for _, _, value in secret):  # which of them is the last?
            text = text.replace(url.partition("://")[2], _HIDDEN)
        text = text.replace(f":{unescaped[2]}@", f":{_HIDDEN}@")
    if (found := _PASSWORD.search(base)) is not None:
        text = text.replace(f":{found[1]}@", f":{_HIDDEN}@")
    for name, _, value in secret:
        text = text.replace(f"{name}={value}", f"{name}={_HIDDEN}")
    return text

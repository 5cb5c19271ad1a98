"""Where options of a command come from, beside its flags: the environment, then a file.

A flag counts before ``ASYNCKV_STORE`` of the environment, that before ``store`` in the
file that ``--config`` names, and that before the default. Whatever is wrong is said
together with where it came from.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from cyclopts import App, ArgumentCollection, Token
from cyclopts.config import Dict, Env

from asynckv.errors import ConfigError

__all__ = ("ENVIRONMENT", "converter", "converter_of_each", "from_file")

_T = TypeVar("_T")

ENVIRONMENT: Final = Env("ASYNCKV_", command=False)
"""``ASYNCKV_DRAIN_S`` is ``--drain-s``; of a list the items are apart by spaces."""


def from_file(
    app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Take options from the file that ``--config`` names, if it was given.

    TOML, or JSON where the name ends in ``.json``. Its keys are the options' names.

    :raises ConfigError: it cannot be read
    """
    for argument in arguments:
        if argument.name == "--config" and argument.tokens:
            path = Path(argument.tokens[-1].value)
            # Without commands: the keys are at the top, also one named as a command.
            Dict(_read(path), source=str(path))(app, (), arguments)


def converter(make: Callable[[str], _T]) -> Callable[[object, Sequence[Token]], _T]:
    """Return how cyclopts makes an option of one text, if that is not by its type.

    ``make`` raises ``ValueError`` for what is wrong; what is said then names the file.
    """
    return lambda hint, tokens: _made(make, tokens[0])


def converter_of_each(
    make: Callable[[str], _T],
) -> Callable[[object, Sequence[Token]], tuple[_T, ...]]:
    """As :func:`converter`, for an option that may be repeated."""
    return lambda hint, tokens: tuple(_made(make, token) for token in tokens)


def _made(make: Callable[[str], _T], token: Token) -> _T:
    try:
        return make(token.value)
    except ValueError as exc:
        is_named = token.source in ("cli", ENVIRONMENT.source)
        raise ValueError(f"{exc}{'' if is_named else f', in {token.source}'}") from exc


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as exc:
        why = exc.strerror or str(exc)
    except ValueError as exc:
        why = str(exc)
    raise ConfigError(
        f"{str(path)!r} cannot be read: {why}",
        hint='write lines as store = "8GiB", or JSON in a file that ends in .json',
    )

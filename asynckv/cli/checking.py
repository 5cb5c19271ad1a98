"""``asynckv check-config``: what a configuration means, and what is wrong with it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from asynckv.config import KVTransferConfig
from asynckv.connectors.registry import Explained, explain, explain_options
from asynckv.errors import ConfigError
from asynckv.observability.lines import without_passwords

__all__ = ("check_config",)

_HOW: Final = (
    "write @ and the path of a file of JSON, as @config.json, or the JSON itself"
)


def check_config(
    config: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None, /
) -> int:
    """Explain a KVTransferConfig. The exit status is 1 if something is wrong with it.

    Nothing is opened and nobody is asked.

    Parameters
    ----------
    config
        The JSON that ``--kv-transfer-config`` takes, ``@FILE`` to read it from a file,
        or ``-`` from standard input. Without it the variables ``ASYNCKV_...`` are read.
    """
    try:
        explained = _explain(_text_of(config))
    except ConfigError as exc:
        explained = Explained((), exc.problems)
    except RecursionError:
        explained = Explained((), ("the configuration is nested too deeply",))
    for fact in explained.facts:
        print(without_passwords(fact))
    for problem in explained.problems:
        print(f"wrong: {without_passwords(problem)}")
    return 1 if explained.problems else 0


def _explain(text: str | None) -> Explained:
    try:
        if text is None:
            return explain(KVTransferConfig.from_env())
        return explain(KVTransferConfig.from_json(text))
    except ConfigError as exc:
        options = explain_options(_fields_in(text))
        return Explained((), (*exc.problems, *options))


def _text_of(config: str | None) -> str | None:
    """Return the JSON that is meant; ``None``: the environment is.

    :raises ConfigError: there is no such file, or it holds no text
    """
    if config is None or (config != "-" and not config.startswith("@")):
        return config
    name = "standard input" if config == "-" else repr(config[1:])
    try:
        if config == "-":
            return sys.stdin.read()
        return Path(config[1:]).read_text(encoding="utf-8")
    except UnicodeError:
        why = "it is not text in UTF-8"
    except (OSError, ValueError) as exc:
        why = (isinstance(exc, OSError) and exc.strerror) or str(exc)
    raise ConfigError(f"{name} cannot be read: {why}", hint=_HOW)


def _fields_in(text: str | None) -> dict[str, object]:
    """Return the fields that are written there, however wrong they are."""
    if text is None:
        given = os.environ.get("ASYNCKV_KV_CONNECTOR_EXTRA_CONFIG", "{}")
        text = f'{{"kv_connector_extra_config": {given}}}'
    try:
        fields = json.loads(text)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}

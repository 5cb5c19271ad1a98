"""``asynckv check-config``: what a configuration means, and what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from asynckv.config import KVTransferConfig
from asynckv.connectors.explaining import explain
from asynckv.errors import ConfigError

__all__ = ("check_config",)


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
        explained = explain(_read(config))
    except (ConfigError, OSError, UnicodeError) as exc:
        print(f"wrong: {exc}")
        return 1
    for fact in explained.facts:
        print(fact)
    for problem in explained.problems:
        print(f"wrong: {problem}")
    return 1 if explained.problems else 0


def _read(config: str | None) -> KVTransferConfig:
    if config is None:
        return KVTransferConfig.from_env()
    if config == "-":
        return KVTransferConfig.from_json(sys.stdin.read())
    if config.startswith("@"):
        return KVTransferConfig.from_json(Path(config[1:]).read_text(encoding="utf-8"))
    return KVTransferConfig.from_json(config)

"""A self-contained HTML document: nothing in it is fetched from anywhere."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

from asynckv.errors import ConfigError

__all__ = ("check_writable", "write_document")


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


def write_document(title: str, package: str, body: str) -> str:
    """Return the whole file: ``body`` as it is, in the style of a package.

    That is the ``page.css`` beside its modules.
    """
    folder = importlib.resources.files(package)
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )

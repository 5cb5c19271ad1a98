"""A self-contained HTML document: nothing in it is fetched from anywhere."""

from __future__ import annotations

import importlib.resources

__all__ = ("write_document",)


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

"""``python -m asynckv`` is the ``asynckv`` command."""

from __future__ import annotations

from asynckv.cli.main import main

__all__: tuple[str, ...] = ()

if __name__ == "__main__":
    main()

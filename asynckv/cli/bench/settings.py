"""What a user chooses for a bench.

Plain values: nothing here imports torch, so that ``--help`` does not either.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from asynckv.cli.process import LoopName
from asynckv.security.tls import TLS

__all__ = (
    "DigestName",
    "Selection",
    "Settings",
)

_START_S = 4.0
_CASE_S, _QUICK_CASE_S = 5.0, 0.4

DigestName: TypeAlias = Literal["auto", "full", "edges", "off"]
"""As ``asynckv.links.options.Digest``, which imports torch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the link, as ``serve`` and ``connect`` have them, and the loop."""

    digest: DigestName = "auto"
    lanes: int | None = None
    secret_file: str | None = None
    tls: TLS | None = None
    allow_plaintext: bool = False
    loop: LoopName = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Which cases are measured, and for how long.

    ``cases`` are names or patterns, ``shapes`` are tensors by bytes of each, as
    ``32x2MiB``: one case each, and the only ones where no ``cases`` are named.
    ``seconds`` is how long each case is measured, instead of so many rounds.
    """

    quick: bool = False
    cases: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    seconds: float | None = None

    def about_s(self, cases: int) -> float:
        """About how long so many cases take on an idle machine."""
        each_s = _QUICK_CASE_S if self.quick else _CASE_S
        if self.seconds is not None:
            each_s = self.seconds + 1
        return _START_S + cases * each_s

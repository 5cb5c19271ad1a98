"""What a user chooses for a bench, and how much the cases then move.

Plain values: nothing here imports torch, so that ``--help`` does not either.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from asynckv.cli.process import LoopName
from asynckv.links.options import Digest
from asynckv.security.tls import TLS

__all__ = ("FULL", "QUICK", "Scale", "Selection", "Settings")

_KIB, _MIB = 2**10, 2**20
_START_S = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the link, as ``serve`` and ``connect`` have them, and the loop."""

    digest: Digest = "auto"
    lanes: int | None = None
    secret_file: str | None = None
    tls: TLS | None = None
    allow_plaintext: bool = False
    loop: LoopName = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Which cases are measured, and for how long.

    ``cases`` are names or patterns, ``shapes`` are (tensors, bytes of each): one case
    each, and the only ones where no ``cases`` are named. ``seconds`` is how long each
    case is measured, instead of the rounds of its scale.
    """

    quick: bool = False
    cases: tuple[str, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()
    seconds: float | None = None

    @property
    def scale(self) -> Scale:
        """How much the cases move."""
        return QUICK if self.quick else FULL

    def about_s(self, cases: int) -> float:
        """About how long so many cases take on an idle machine."""
        each_s = self.scale.case_s if self.seconds is None else self.seconds + 1
        return _START_S + cases * each_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How much the cases move. Shapes are (number of tensors, bytes of each)."""

    case_s: float
    """About how long one case takes."""
    rounds: int
    """Even, so that each turn of a baseline comes first as often as second."""
    sizes: tuple[int, ...]
    entry: int
    layers: tuple[int, int]
    small: tuple[int, int]
    scattered_nbytes: tuple[int, ...]
    scattered_total: int
    repeat_to: int
    """Transfers are repeated within a measurement until so many bytes have moved."""
    pings: int
    fetches: int
    outstanding: tuple[int, ...]
    requests: int
    pairs: int
    tail: tuple[int, int]
    compute_s: float
    """How long the layer-wise case pretends to compute one layer."""
    ticks: int


_SCATTERED: Final = (4 * _KIB, 8 * _KIB, 18 * _KIB, 64 * _KIB, 2 * _MIB)

FULL: Final = Scale(
    case_s=5.0,
    rounds=6,
    sizes=(64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB),
    entry=64 * _MIB,
    layers=(64, 16 * _MIB),
    small=(10_000, 4 * _KIB),
    scattered_nbytes=_SCATTERED,
    scattered_total=32 * _MIB,
    repeat_to=256 * _MIB,
    pings=1000,
    fetches=100,
    outstanding=(1, 10, 100, 1000),
    requests=2000,
    pairs=500,
    tail=(32, 4 * _MIB),
    compute_s=0.01,
    ticks=1000,
)
QUICK: Final = Scale(
    case_s=0.4,
    rounds=6,
    sizes=(64 * _KIB,),
    entry=_MIB,
    layers=(8, 256 * _KIB),
    small=(100, 4 * _KIB),
    scattered_nbytes=_SCATTERED,
    scattered_total=4 * _MIB,
    repeat_to=128 * _KIB,
    pings=10,
    fetches=2,
    outstanding=(1, 10),
    requests=20,
    pairs=5,
    tail=(4, 64 * _KIB),
    compute_s=0.001,
    ticks=10,
)
"""Shows that everything works; its figures say little."""

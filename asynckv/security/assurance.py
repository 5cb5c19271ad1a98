"""What the connection below a greeting has proved already."""

from __future__ import annotations

import dataclasses
from typing import Final

from asynckv.security.names import CertifiedNames

__all__ = ("NO_ASSURANCE", "Assurance")


@dataclasses.dataclass(frozen=True)
class Assurance:
    """``names`` are the peer's, by its certificate; ``binding`` is of both sides'.

    Whoever hands words on from one connection to another has other certificates,
    and so another ``binding``.
    """

    names: CertifiedNames | None = None
    binding: bytes = b""


NO_ASSURANCE: Final = Assurance()
"""A connection that anybody may have opened, or may be in the middle of."""

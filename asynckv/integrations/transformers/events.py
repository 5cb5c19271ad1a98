"""What happens to a layer, for whoever draws it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

__all__ = ("LayerEvent", "LayerObserver")


@dataclasses.dataclass(frozen=True, slots=True)
class LayerEvent:
    """One step of one layer, at a time of :func:`time.monotonic`.

    ``computed`` and ``sent`` (the producer's buffer has it) in the prefill;
    ``landed`` and ``used`` (the forward took it up) in the decode. On Linux the
    clock is the same in all processes of a host.
    """

    layer: int
    what: Literal["computed", "sent", "landed", "used"]
    at: float = dataclasses.field(default_factory=time.monotonic)


LayerObserver: TypeAlias = Callable[[LayerEvent], None]
"""Called on the loop; must not wait and must not raise."""

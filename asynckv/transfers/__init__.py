"""One transfer: what is offered, granted, sent and verified, by any route."""

from __future__ import annotations

__all__: tuple[str, ...] = ()

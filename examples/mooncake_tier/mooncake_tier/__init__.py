"""``mooncake://master:50051``: a tier of asynckv's stores in a Mooncake Store."""

from __future__ import annotations

from mooncake_tier.tier import MooncakeTier, open_tier

__all__ = ("MooncakeTier", "open_tier")

"""A tier of a store in Redis, or in what speaks its protocol."""

from __future__ import annotations

from asynckv.stores.redis.tier import RedisStatistics, RedisTier

__all__ = ("RedisStatistics", "RedisTier")

"""Values in an object store: a bucket, or a file system that machines share."""

from __future__ import annotations

from asynckv.stores.objects.tier import ObjectTier
from asynckv.stores.objects.url import parse_object_url

__all__ = ("ObjectTier", "parse_object_url")

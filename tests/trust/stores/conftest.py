"""A server that speaks S3."""

from __future__ import annotations

from harness.moto_server import moto, obstore_has_its_threads, s3

__all__ = ("moto", "obstore_has_its_threads", "s3")

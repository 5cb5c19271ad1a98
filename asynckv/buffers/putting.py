"""The asking side of one remote ``put``."""

from __future__ import annotations

import torch

from asynckv.buffers.manifest import INLINE_NBYTES
from asynckv.buffers.sending import Sending
from asynckv.links.link import Link
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Put
from asynckv.tensors.views import bytes_of, spec_of

__all__ = ("begin_put",)


def begin_put(link: Link, key: str, tensor: torch.Tensor) -> Sending:
    """Ask for a value to be stored. ``tensor`` is dense. Never waits."""
    view = bytes_of(tensor)
    inline = len(view) <= INLINE_NBYTES
    frame = Put(
        key=key,
        transfer=link.new_transfer(),
        inline=inline,
        spec=spec_of(tensor),
        digest=digest_of(view) if inline and link.digest != "off" else b"",
    )
    return Sending(link, frame, view if inline else b"", [view])

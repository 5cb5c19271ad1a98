"""The asking side of one remote ``put``."""

from __future__ import annotations

import torch

from asynckv.buffers.leaving_parts import OutwardWays
from asynckv.buffers.manifest import INLINE_NBYTES
from asynckv.buffers.sending import Sending
from asynckv.links.link import Link
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Put
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.views import bytes_of, spec_of

__all__ = ("begin_put",)


def begin_put(
    link: Link,
    key: str,
    source: torch.Tensor | KVOnGpu,
    ways: OutwardWays | None = None,
) -> Sending:
    """Ask for a value to be stored. ``source`` is dense; if it is read on a GPU, its
    bytes are too many to ride. Never waits.
    """
    view, inline = memoryview(b""), False
    if isinstance(source, KVOnGpu):
        spec = source.spec
    else:
        spec, inline = spec_of(source), source.nbytes <= INLINE_NBYTES
        view = bytes_of(source) if inline else view
    frame = Put(
        key=key,
        transfer=link.new_transfer(),
        inline=inline,
        spec=spec,
        digest=digest_of(view) if inline and link.digest != "off" else b"",
    )
    return Sending(link, frame, view, [source], ways=ways)

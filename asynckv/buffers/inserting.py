"""The asking side of one remote ``insert``."""

from __future__ import annotations

from collections.abc import Sequence

from asynckv.buffers.drafts import Draft
from asynckv.buffers.manifest import INLINE_NBYTES, check_body, content_digest, pack
from asynckv.buffers.sending import Sending
from asynckv.links.link import Link
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Insert
from asynckv.protocol.values import TensorRecord
from asynckv.tensors.blocks import KVMemory, memory_of
from asynckv.tensors.runs import joined

__all__ = ("begin_insert",)


def begin_insert(
    link: Link,
    draft: Draft,
    tensors: Sequence[KVMemory],
    digests: Sequence[bytes] | None,
) -> Sending:
    """Ask for an entry to be put in. ``tensors`` are dense, or blocks. Never waits.

    :raises EntryTooLarge: tokens, roi and names do not fit in one frame
    """
    memory = [memory_of(tensor) for tensor in tensors]
    inline = sum(one.nbytes for one in memory) <= INLINE_NBYTES
    views = [joined(one) for one in memory] if inline else []
    if link.digest == "off":
        # Equal is then what has equal tokens, names and shapes.
        digests = [b""] * len(memory)
    elif inline and digests is None:
        digests = [digest_of(view) for view in views]
    records = [
        TensorRecord(name, spec, b"" if digests is None else digests[i])
        for i, (name, spec) in enumerate(draft.specs.items())
    ]
    tokens = draft.input_tokens, draft.roi
    frame = Insert(
        entry_id=draft.entry_id,
        transfer=link.new_transfer(),
        inline=inline,
        ttl_s=draft.ttl_s,
        deliveries=draft.deliveries,
        digest=b"" if digests is None else content_digest(records, *tokens),
    )
    body = pack(records, *tokens, views)
    check_body(link.limits.max_body_bytes, body)
    return Sending(link, frame, body, memory, digests)

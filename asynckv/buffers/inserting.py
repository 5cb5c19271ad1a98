"""The asking side of one remote ``insert``."""

from __future__ import annotations

from collections.abc import Sequence

from asynckv.buffers.entries.entries import Draft
from asynckv.buffers.gpu_staging import Source, StagedTensor, are_staged
from asynckv.buffers.leaving_parts import OutwardWays
from asynckv.buffers.manifest import INLINE_NBYTES, check_body, content_digest, pack
from asynckv.buffers.sending import Sending
from asynckv.links.link import Link
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Insert
from asynckv.protocol.values import TensorRecord
from asynckv.tensors.blocks import KVMemory, memory_of
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.runs import joined

__all__ = ("begin_insert",)


def begin_insert(
    link: Link,
    draft: Draft,
    sources: Sequence[Source],
    digests: Sequence[bytes] | None,
    ways: OutwardWays | None = None,
) -> Sending:
    """Ask for an entry to be put in. ``sources`` are dense, or blocks; some are read on
    a GPU only if there are too many bytes to ride. Never waits.

    :raises EntryTooLarge: tokens, roi and names do not fit in one frame
    """
    inline = sum(source.nbytes for source in sources) <= INLINE_NBYTES
    views = [joined(memory_of(source)) for source in _in_host(sources) if inline]
    if link.digest == "off":
        # Equal is then what has equal tokens, names and shapes.
        digests = [b""] * len(sources)
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
        on_gpu=are_staged(sources),
    )
    body = pack(records, *tokens, views)
    check_body(link.limits.max_body_bytes, body)
    return Sending(link, frame, body, sources, digests, ways)


def _in_host(sources: Sequence[Source]) -> list[KVMemory]:
    return [s for s in sources if not isinstance(s, StagedTensor | KVOnGpu)]

"""Memory that the caller named in ``into=`` for the tensors of an entry."""

from __future__ import annotations

from collections.abc import Mapping

from asynckv.observability.lines import as_line
from asynckv.tensors.blocks import KVMemory, check_apart, check_landing, landing_of
from asynckv.transfers.manifest import check_names
from asynckv.types import TensorSpec

__all__ = ("check_targets", "match_targets")


def check_targets(
    into: Mapping[str, KVMemory] | None, *, may_be_on_gpu: bool = False
) -> Mapping[str, KVMemory]:
    """Refuse memory that nothing can land in, before anything is waited for.

    :raises ValueError: a name that no entry has, or memory that is not plain CPU
        memory (with ``may_be_on_gpu``: or a GPU's), contiguous or in contiguous rows;
        or two of them share memory
    :raises TypeError: no mapping of names to memory
    """
    if into is None:
        return {}
    if not isinstance(into, Mapping):
        raise TypeError(
            f"into maps a tensor's name to its memory; it is a {type(into).__name__}"
        )
    if not into:
        return {}
    check_names(into)
    found: dict[str, KVMemory] = {}
    for name, memory in into.items():
        if not isinstance(memory, KVMemory):
            raise TypeError(
                f"into[{name!r}] is a {type(memory).__name__}, not a tensor or KVBlocks"
            )
        try:
            found[name] = landing_of(memory, may_be_on_gpu=may_be_on_gpu)
        except ValueError as exc:
            raise ValueError(f"into[{name!r}]: {exc}") from None
    check_apart(found)
    return found


def match_targets(
    specs: Mapping[str, TensorSpec], targets: Mapping[str, KVMemory]
) -> None:
    """Compare ``into`` with the entry that was selected.

    :raises ValueError: a name the entry does not have, another shape or dtype
    """
    for name, memory in targets.items():
        if name not in specs:
            raise ValueError(
                f"into[{name!r}]: the entry has no such tensor; it has "
                f"{as_line(', '.join(specs)) or 'none'}"
            )
        check_landing(memory, specs[name], name)

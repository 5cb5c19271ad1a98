from __future__ import annotations

import pytest

from asynckv.buffers.values import StoredValues
from asynckv.errors import BufferClosed, EntryTooLarge
from asynckv.tensors.arena import HeapArena
from asynckv.types import KVFingerprint, TensorSpec

SPEC = TensorSpec((60,), "uint8")
OTHER = KVFingerprint.of("other")


async def stored(*fingerprints: KVFingerprint | None) -> StoredValues:
    values = StoredValues(HeapArena(100), lambda: None)
    for fingerprint in fingerprints:
        values.commit(await values.reserve("a", SPEC, fingerprint), b"digest")
    return values


async def test_a_value_belongs_to_the_fingerprint_of_who_put_it() -> None:
    values = await stored(OTHER)
    assert values.has(["a", "b"], OTHER) == (True, False)
    assert values.has(["a"], None) == (False,)
    assert values.lookup("a", None) is None and not values.remove("a", None)
    assert values.remove("a", OTHER) and values.has(["a"], OTHER) == (False,)


async def test_a_value_that_is_held_is_not_dropped_for_room() -> None:
    values = await stored(None)
    (held,) = values.hold(["a"], None)
    assert held is not None and held.digest == b"digest"
    assert values.reserve_nowait("b", SPEC, None) is None
    values.release(held)
    pending = values.reserve_nowait("b", SPEC, None)
    assert pending is not None and values.has(["a"], None) == (False,)
    values.discard(pending)


async def test_what_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(EntryTooLarge, match="101 bytes can never fit in 100"):
        await (await stored()).reserve("a", TensorSpec((101,), "uint8"), None)


async def test_once_it_is_closed_every_call_says_so() -> None:
    values = await stored(None)
    values.close()
    for call in (
        lambda: values.check_usable("a"),
        lambda: values.lookup("a", None),
        lambda: values.hold(["a"], None),
        lambda: values.remove("a", None),
        lambda: values.has(["a"], None),
        lambda: values.reserve_nowait("a", SPEC, None),
    ):
        with pytest.raises(BufferClosed):
            call()


async def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(TypeError):
        (await stored()).check_usable(7)  # type: ignore[arg-type]

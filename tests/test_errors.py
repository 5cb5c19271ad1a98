from __future__ import annotations

import inspect
import re

import pytest

from asynckv import errors
from asynckv.errors import (
    AsyncKVError,
    EntryAborted,
    EntryTooLarge,
    GPUUnavailable,
    IncompatiblePeer,
    PeerLost,
    PipeBroken,
    WrongRole,
)

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_descends_from_the_root_and_has_a_hint(
    error: type[AsyncKVError],
) -> None:
    assert issubclass(error, AsyncKVError)
    assert isinstance(error().hint, str)


@pytest.mark.parametrize("error", CLASSES)
def test_an_error_without_a_message_still_says_something(
    error: type[AsyncKVError],
) -> None:
    assert str(error())


def test_the_page_draws_the_tree_that_the_classes_make() -> None:
    drawn = re.findall(r"^( *)- ``(\w+)``", inspect.getdoc(errors) or "", re.MULTILINE)
    path: list[str] = []
    for indent, name in drawn:
        del path[len(indent) // 2 :]
        parent = path[-1] if path else "Exception"
        assert parent in {base.__name__ for base in getattr(errors, name).__bases__}
        path.append(name)
    assert sorted(name for _, name in drawn) == sorted(errors.__all__)


def test_the_hint_is_part_of_the_text_and_not_of_the_message() -> None:
    error = AsyncKVError("it broke", hint="mend it")
    assert str(error) == "it broke (mend it)"
    assert error.message == "it broke"


def test_a_class_may_have_a_hint_of_its_own() -> None:
    assert "a kv_producer inserts" in str(WrongRole("no insert here"))
    assert "pip install" in str(GPUUnavailable("no CuPy"))
    assert GPUUnavailable("no CuPy", hint="plug one in").hint == "plug one in"


def test_a_lost_peer_is_a_connection_error() -> None:
    with pytest.raises(ConnectionError):
        raise PeerLost("gone")
    assert issubclass(PipeBroken, PeerLost)


def test_facts_are_attributes() -> None:
    assert PipeBroken("cut", maybe_delivered=3).maybe_delivered == 3
    assert IncompatiblePeer("other model", field="model").field == "model"
    assert EntryAborted(reason="ttl").reason == "ttl"
    too_large = EntryTooLarge(nbytes=10, max_bytes=4)
    assert (too_large.nbytes, too_large.max_bytes) == (10, 4)


def test_facts_are_in_the_text_where_nothing_else_is_said() -> None:
    assert "10 bytes can never fit in 4" in str(EntryTooLarge(nbytes=10, max_bytes=4))
    assert "ttl" in str(EntryAborted(reason="ttl"))
    assert "its producer failed" in str(EntryAborted(reason="producer"))

from __future__ import annotations

import pytest

from asynckv.abc import PayloadTransport
from asynckv.links.options import TRANSPORTS


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_stands_under_its_own_name(name: str) -> None:
    assert issubclass(TRANSPORTS[name], PayloadTransport)
    assert TRANSPORTS[name].name == name


def test_the_paths_of_this_release_are_there() -> None:
    assert {"inline", "mem"} <= set(TRANSPORTS)

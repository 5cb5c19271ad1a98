from __future__ import annotations

import pytest

from harness.cupy_double import CUDARuntimeError, CupyDouble, NcclError


def test_it_notes_what_it_is_asked_and_answers() -> None:
    cupy = CupyDouble()
    cupy.answers["malloc"] = 7
    assert cupy.runtime.malloc(3) == 7
    assert cupy.calls == [("malloc", 3)]


def test_it_raises_what_it_is_told_to() -> None:
    cupy = CupyDouble()
    cupy.answers["free"] = CUDARuntimeError(1)
    with pytest.raises(CUDARuntimeError):
        cupy.runtime.free(1)


def test_codes_above_its_table_are_key_errors_as_in_cupy() -> None:
    with pytest.raises(KeyError, match="7"):
        NcclError(7)

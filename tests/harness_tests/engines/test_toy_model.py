from __future__ import annotations

import numpy

from harness.engines.toy_model import ToyModel, mix


def test_kv_depends_on_every_token_before() -> None:
    model = ToyModel()
    one, two = model.rows([1, 2, 3], 0, 1), model.rows([9, 2, 3], 0, 1)
    assert one.shape == (3, 2, 4, 8)
    assert not (one == two).all(axis=(1, 2, 3)).any()
    assert (model.rows([1, 2, 3], 2, 1) == one[2:]).all()


def test_the_next_token_depends_on_every_byte() -> None:
    model = ToyModel(layers=1, heads=1)
    rows = model.rows([1, 2, 3], 0, 0)[:, :, 0]
    before = model.next_token([model.sum_of(rows, 0, 0)])
    rows = rows.copy()
    rows[1, 0, 3] ^= 1
    assert model.next_token([model.sum_of(rows, 0, 0)]) != before


def test_it_generates_the_same_again() -> None:
    model = ToyModel()
    assert model.generate([1, 2], 3) == model.generate([1, 2], 3)
    words = numpy.arange(4, dtype=numpy.uint64)
    assert len(set(mix(words).tolist())) == 4

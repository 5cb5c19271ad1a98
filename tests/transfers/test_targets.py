from __future__ import annotations

import pytest
import torch

from asynckv.transfers.targets import check_targets, match_targets
from asynckv.types import TensorSpec


def test_targets_are_checked_before_anything_is_waited_for() -> None:
    assert check_targets(None) == {}
    with pytest.raises(ValueError, match="no tensor's name"):
        check_targets({"keys": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"into\['key'\]: .* not contiguous"):
        check_targets({"key": torch.zeros(4, 4).T})


def test_targets_must_fit_the_entry() -> None:
    specs = {"key": TensorSpec((2,), "float32")}
    match_targets(specs, {"key": torch.zeros(2)})
    for name, tensor in (("hidden", torch.zeros(2)), ("key", torch.zeros(3))):
        with pytest.raises(ValueError, match=name):
            match_targets(specs, {name: tensor})

"""What an entry carries beside the layers, so that no forward is needed first."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final, Literal, TypeAlias

import torch
from transformers import PreTrainedModel

from asynckv.errors import ConfigError
from asynckv.integrations.transformers.layers import text_config
from asynckv.types import TensorSpec

__all__ = (
    "DEFAULT_CARRY",
    "FINGERPRINT",
    "FIRST_TOKEN",
    "HIDDEN",
    "LOGITS",
    "Carried",
    "Carry",
)

Carry: TypeAlias = Literal["first_token", "logits", "hidden"]

FINGERPRINT: Final = "extras.fingerprint"
FIRST_TOKEN: Final = "extras.first_token"
LOGITS: Final = "extras.logits"
HIDDEN: Final = "hidden"

DEFAULT_CARRY: Final[frozenset[Carry]] = frozenset({"first_token"})


@dataclasses.dataclass(frozen=True, eq=False)
class Carried:
    """What the prefill's last position gave: next tokens, logits, hidden state.

    ``first_token`` is ``[batch]``, ``logits`` ``[batch, vocabulary]`` in float32
    and ``hidden`` ``[batch, 1, hidden_size]``.
    """

    first_token: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What there is, by the name it travels under."""
        named = {
            FIRST_TOKEN: self.first_token,
            LOGITS: self.logits,
            HIDDEN: self.hidden,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def of(
        cls, logits: torch.Tensor, hidden: torch.Tensor | None, carry: Collection[Carry]
    ) -> Carried:
        """Choose greedily from the last position's ``logits``, as ``generate`` does."""
        logits = logits.detach().to("cpu", torch.float32)
        return cls(
            logits.argmax(-1) if "first_token" in carry else None,
            logits if "logits" in carry else None,
            None if hidden is None else hidden.detach().cpu(),
        )

    @staticmethod
    def specs(
        model: PreTrainedModel, batch: int, carry: Collection[Carry]
    ) -> dict[str, TensorSpec]:
        """Declare, before the forward, what it will add.

        :raises ValueError: if ``carry`` names anything else
        :raises ConfigError: if the model has no language model head
        """
        unknown = set(carry) - {"first_token", "logits", "hidden"}
        if unknown:
            raise ValueError(f"cannot carry {', '.join(sorted(unknown))}")
        head = model.get_output_embeddings()
        if head is None:
            raise ConfigError(f"{type(model).__name__} has no language model head")
        specs = {}
        if "first_token" in carry:
            specs[FIRST_TOKEN] = TensorSpec((batch,), "int64")
        if "logits" in carry:
            vocabulary = int(head.weight.shape[0])
            specs[LOGITS] = TensorSpec((batch, vocabulary), "float32")
        if "hidden" in carry:
            size = int(text_config(model.config).hidden_size)
            specs[HIDDEN] = TensorSpec((batch, 1, size), str(model.dtype))
        return specs

"""The sizes of a dense decoder layer beside its attention, from a model's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch.errors import ModelError
from dispatch.hf_fields import Fields

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")


@dataclass(frozen=True, slots=True)
class DenseSizes:
    """Elements of a token's hidden state, and of what its MLP has between its products."""

    hidden_size: int
    intermediate_size: int

    def split(self, tp: int) -> DenseSizes:
        """What one of `tp` ranks has. Raises ModelError where the MLP does not divide."""
        if self.intermediate_size % tp:
            raise ModelError(f"intermediate_size={self.intermediate_size} cannot be split over tp={tp} ranks")
        return DenseSizes(self.hidden_size, self.intermediate_size // tp)


def read_dense(fields: Fields) -> DenseSizes:
    """The whole model's sizes. Raises ModelError for a mixture of experts, or where a size is missing."""
    fields.refuse(dict.fromkeys(_EXPERTS, "a mixture of experts; this is for dense models"))
    fields.require("hidden_size", "intermediate_size")
    return DenseSizes(fields.integer("hidden_size") or 0, fields.integer("intermediate_size") or 0)

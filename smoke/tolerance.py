"""How far logits may be from the float32 reference, and whether greedy tokens are the golden ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from smoke.golden import Golden, expected_logits

# Largest error of a logit, by golden; logits have a standard deviation of 1. The torch backends are off by up to 0.05,
# 0.2 and 0.11. Over an fp8 cache, a value that bf16 moves across the middle between two fp8 numbers is off by a whole
# step of an eighth, and kernels that round Q and the softmax to fp8 too are off by more; among experts, the last one
# chosen may be another. One wrong token of the context moves logits by 1 or more: tests/test_smoke_model.py.
TOLERANCES = {"dense": 0.15, "dense-fp8": 0.5, "moe": 0.25}


@dataclass
class Tally:
    """What comparing gave so far. `wrong`: a line for each request that is wrong, at its first wrong token.

    `near_ties`: tokens that differ from the golden where the two best logits are closer than the tolerance.
    """

    tolerance: float
    tokens: int = 0
    near_ties: int = 0
    largest_error: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, golden: Golden, logits: torch.Tensor) -> None:
        """Compare a request's logits, float32 [steps, vocab], with the first so many steps of a golden."""
        steps = len(logits)
        expected = expected_logits(name, golden)[:steps]
        errors = (logits - expected).abs().amax(dim=1)
        self.tokens += steps
        self.largest_error = max(self.largest_error, float(errors.max()))
        differs = logits.argmax(dim=1) != torch.tensor(golden.tokens[:steps])
        near = torch.tensor(golden.gaps[:steps]) < self.tolerance
        self.near_ties += int((differs & near).sum())
        bad = ~(errors <= self.tolerance) | (differs & ~near)  # NaN is no number within the tolerance
        if bool(bad.any()):
            step = int(bad.int().argmax())
            token = int(logits[step].argmax())
            self.wrong.append(
                f"prompt of {len(golden.prompt)}, token {step}: {token} for {golden.tokens[step]}, "
                f"logits off by {float(errors[step]):.3g}, allowed {self.tolerance}"
            )


def tally(name: str, goldens: Sequence[Golden], served: Sequence[torch.Tensor]) -> Tally:
    """Compare all requests of a run."""
    result = Tally(TOLERANCES[name])
    for golden, logits in zip(goldens, served, strict=True):
        result.add(name, golden, logits)
    return result

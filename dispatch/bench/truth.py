"""Whether what the harness predicts is what a stack of a model's layers sees: verdicts, from times alone.

Both are differences to the default, in microseconds a layer, medians over rounds of the same lengths. plan() on the
host is in neither: a replay begins after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatch.samples import TWIN
from dispatch.spec import AttentionSpec

NEAR_TIE = 0.03  # of the default's attention time: a smaller real difference decides nothing, so its sign is not judged
SHARE = 1 / 3  # how far from the real difference the predicted one may lie
FLOOR_US = 1.0  # or so far: about the noise of a layer's difference

PARTS = ("stack_us", "plan_us", "begin_us", "layer_us")
"""The stack's step without plan(); and of the harness: plan(), begin_step, one layer's attention."""


class Verdict(Enum):
    """What a predicted difference is worth."""

    RIGHT = "right"
    NEAR_TIE = "near tie"  # the size is right; which of the two is faster does not matter
    WRONG_ORDER = "wrong order"
    WRONG_SIZE = "wrong size"

    @property
    def ok(self) -> bool:
        """Whether the prediction may be relied on."""
        return self in (Verdict.RIGHT, Verdict.NEAR_TIE)


def judge(real_us: float, predicted_us: float, default_us: float) -> Verdict:
    """`real_us`, `predicted_us`: differences to the default a layer; `default_us`: its own predicted time a layer."""
    near_tie = abs(real_us) <= NEAR_TIE * default_us
    if not near_tie and real_us * predicted_us <= 0:
        return Verdict.WRONG_ORDER
    if abs(predicted_us - real_us) > max(SHARE * abs(real_us), FLOOR_US):
        return Verdict.WRONG_SIZE
    return Verdict.NEAR_TIE if near_tie else Verdict.RIGHT


@dataclass(frozen=True, slots=True)
class Comparison:
    """A backend in a cell; microseconds a layer. `attention_us` is predicted; the differences are to the default.

    `verdict` is None for the default itself, and for its second run, whose differences are the noise.
    """

    backend: str
    attention_us: float
    real_us: float
    predicted_us: float
    verdict: Verdict | None


@dataclass(frozen=True, eq=False)
class TruthCell:
    """Times of one batch size and mean KV length.

    `max_kv`: median over rounds of the longest request. `backends`: the default first, then its second run. `times`:
    microseconds, float64 [PARTS, backend, round], NaN where a backend failed. `num_layers`: those of the stack.
    """

    batch: int
    mean_kv: int
    max_kv: int
    num_layers: int
    backends: tuple[str, ...]
    times: NDArray[np.float64]

    def comparisons(self) -> tuple[Comparison, ...]:
        """Every backend that was timed in all rounds."""
        stack, _, begin, layer = self.times
        attention = begin / self.num_layers + layer
        real_of_rounds = (stack - stack[0]) / self.num_layers
        real = np.median(real_of_rounds, axis=1)
        # The error is taken in each round, for the lengths, and with them the differences, are new in each.
        predicted = real + np.median(attention - attention[0] - real_of_rounds, axis=1)
        attention_us = np.median(attention, axis=1)
        return tuple(
            Comparison(
                name,
                float(attention_us[i]),
                float(real[i]),
                float(predicted[i]),
                judge(real[i], predicted[i], attention_us[0]) if name not in (self.backends[0], TWIN) else None,
            )
            for i, name in enumerate(self.backends)
            if not np.isnan(self.times[:, i]).any()
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data: every comparison, and the times of every round, null where there is none."""
        compared = {c.backend: c for c in self.comparisons()}
        rows = {}
        for i, name in enumerate(self.backends):
            rounds = {part: _rounded(self.times[p, i]) for p, part in enumerate(PARTS)}
            rows[name] = {**_summary(compared.get(name)), "rounds": rounds}
        return {"batch": self.batch, "mean_kv": self.mean_kv, "max_kv": self.max_kv, "backends": rows}


@dataclass(frozen=True, eq=False)
class Truth:
    """A whole run. `refused`: backends that do not serve the layer; `failed`: a line for each thing that failed."""

    device: Mapping[str, Any]
    spec: AttentionSpec
    num_layers: int
    default: str
    cells: tuple[TruthCell, ...]
    refused: Mapping[str, str]
    failed: tuple[str, ...]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """All of them."""
        every = (c.verdict for cell in self.cells for c in cell.comparisons())
        return tuple(verdict for verdict in every if verdict is not None)

    @property
    def ok(self) -> bool:
        """Whether something was compared, and all of it is as predicted."""
        return bool(self.verdicts) and all(verdict.ok for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ok": self.ok,
            "device": dict(self.device),
            "spec": self.spec.to_json(),
            "stack_layers": self.num_layers,
            "default": self.default,
            "cells": [cell.to_json() for cell in self.cells],
            "refused": dict(self.refused),
            "failed": list(self.failed),
        }


def _summary(c: Comparison | None) -> dict[str, Any]:
    if c is None:
        return {}
    return {
        "attention_us": round(c.attention_us, 3),
        "real_us": round(c.real_us, 3),
        "predicted_us": round(c.predicted_us, 3),
        "verdict": None if c.verdict is None else c.verdict.value,
    }


def _rounded(times: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(t) else round(float(t), 3) for t in times]

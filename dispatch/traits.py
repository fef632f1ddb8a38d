"""EngineTraits: what an engine declares of itself, and a measurement or the gate may then rely on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Part of a stored plan's key.

    plan_hidden: the engine plans a step while the one before it runs, so plan() counts as no time.
    finite_kv: no slot of its KV cache ever holds NaN: it is zeroed when it is allocated, and a request whose numbers
    become NaN may spoil those that are given its pages. Without it, only kernels that do not let NaN through from
    slots behind a row's end pass the gate (on SM90, XQA over an fp8 cache does).
    exact_lengths: StepInputs.lengths_host is exact, and no upper bound, as it is where steps are scheduled ahead.
    """

    plan_hidden: bool = False
    finite_kv: bool = False
    exact_lengths: bool = True

"""A plan that timing did not make: another kernel in each bucket, so that each is seen at work."""

from __future__ import annotations

from dataclasses import replace

from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.engine.choose import Choice
from dispatch.plan import DecidedBox
from dispatch.samples import Box

BACKENDS = {1: "flashinfer_xqa", 2: "flashinfer_fa2_tc", 4: "vllm_fa3[balanced=1]", 8: "flashinfer_xqa"}
ROUND = tuple(BACKENDS.values())


def force() -> None:
    """Have the adapter's plans name these backends, whatever was measured; buckets above 8 take them in turns."""
    from dispatch.plugins.vllm import prepare

    chosen = prepare.choose

    def choose(groups, request, *given):  # type: ignore[no-untyped-def]
        return [_forced(choice, request.buckets) for choice in chosen(groups, request, *given)]

    prepare.choose = choose


def _forced(choice: Choice, buckets: tuple[int, ...]) -> Choice:
    assert choice.plan is not None, choice.why
    names = {b: BACKENDS.get(b, ROUND[i % len(ROUND)]) for i, b in enumerate(buckets)}
    boxes = tuple(
        DecidedBox(Box(b, 1, 1 << 20, 1000, 1 << 20, str(Candidate.parse(name))), Reason.FASTEST, 2.0)
        for b, name in names.items()
    )
    plan = replace(choice.plan, boxes=boxes)
    return replace(choice, plan=plan, table=plan.table())

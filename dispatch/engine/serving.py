"""Which captured variant serves a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dispatch.engine.capture import Ready
from dispatch.engine.choose import Choice
from dispatch.engine.counts import Counts
from dispatch.engine.prepare import OUTSIDE
from dispatch.engine.ranks import ALONE, Ranks
from dispatch.engine.report import named
from dispatch.engine.variants import Variant
from dispatch.errors import one_line

ONE_STEP_S = 30.0  # how far apart ranks may be in one step


class Serving:
    """The groups' plans and what is captured for them. Counts every step."""

    def __init__(
        self,
        choices: Sequence[Choice],
        ready: Mapping[tuple[int, Variant], Ready],
        counts: Counts,
        ranks: Ranks = ALONE,
    ) -> None:
        """`ready`: by bucket and variant, every bucket's default among them."""
        self.choices, self.ready, self.counts = tuple(choices), dict(ready), counts
        self.ranks = ranks
        self.defaults: Variant = tuple(choice.default for choice in choices)
        self._has_plan = any(choice.table is not None for choice in choices)
        self._names: dict[Variant, str] = {}

    def choose(self, bucket: int, batch: tuple[int, int, int]) -> Variant:
        """The variant that the plans name for (live rows, mean KV, max KV), where it is captured; else the default."""
        if not self._has_plan:
            return self.defaults
        found = [choice.named(batch) for choice in self.choices]
        variant = tuple(one or choice.default for one, choice in zip(found, self.choices, strict=True))
        is_ready = (bucket, variant) in self.ready
        if None in found:
            self.counts.missed(bucket, OUTSIDE)
        elif not is_ready:
            self.counts.missed(bucket, f"{self._named(variant)} is planned and not available")
        else:
            self.counts.hit(bucket, self._named(variant))
        return variant if is_ready else self.defaults

    def planned(self, bucket: int, variant: Variant) -> Ready:
        """After plan(), where needed. A variant that cannot plan has launched nothing yet, and is not used again.

        Raises what the default's plan() raises, and RanksError where a variant could plan on another rank.
        """
        ready = self.ready[bucket, variant]
        try:
            ready.built.plan()
        except Exception as error:
            if variant == self.defaults:
                raise
            # Another graph on this rank alone would be a wrong one: an all-reduce that a graph has captured may read
            # buffers of the graphs that the other ranks captured at that time. What plan() refuses, it mostly refuses
            # on all ranks alike, in this same step. Only then do they meet here; it costs other steps nothing.
            self.ranks.share(f"bucket {bucket}: {self._named(variant)} could not plan", None, ONE_STEP_S)
            del self.ready[bucket, variant]
            self.counts.missed(bucket, f"{self._named(variant)} could not plan: {one_line(error)}")
            ready = self.ready[bucket, self.defaults]
            ready.built.plan()
        return ready

    def _named(self, variant: Variant) -> str:
        if variant not in self._names:
            self._names[variant] = named(variant)
        return self._names[variant]

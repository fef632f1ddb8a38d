"""Which captured variant serves a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dispatch._core import PlanEntry
from dispatch.candidate import Candidate
from dispatch.engine.capture import Ready
from dispatch.engine.choose import Choice
from dispatch.engine.counts import Counts
from dispatch.engine.prepare import OUTSIDE
from dispatch.engine.ranks import ALONE, Ranks
from dispatch.engine.report import named
from dispatch.engine.variants import Variant
from dispatch.errors import one_line

ONE_STEP_S = 30.0  # how far apart ranks may be in one step


@dataclass(slots=True)
class _Answer:
    """What serves a step. `hit`: what is counted for it; or else `miss`, the reason."""

    variant: Variant
    ready: Ready
    hit: str = ""
    miss: str = ""


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
        self.choices, self.ready, self.counts, self.ranks = tuple(choices), dict(ready), counts, ranks
        self.defaults: Variant = tuple(choice.default for choice in choices)
        self._tables = [choice.table for choice in choices]
        self._has_plan = any(table is not None for table in self._tables)
        self._default = {b: _Answer(v, one) for (b, v), one in self.ready.items() if v == self.defaults}
        # By bucket and the entries' identities, which live as long as their tables: to hash one would make its strings.
        self._known: dict[tuple[int, ...], _Answer] = {}

    def choose(self, bucket: int, batch: tuple[int, int, int]) -> Ready:
        """What the plans name for (live rows, mean KV, skew), where it is captured; else the default. Planned.

        A few calls and no more: in a step that follows milliseconds of other work, every line of Python here is cold.
        Raises what the default's plan() raises, and RanksError where a variant could plan on another rank.
        """
        answer = self._default[bucket]
        if self._has_plan:
            entries = [None if table is None else table.lookup(*batch) for table in self._tables]
            key = (bucket, *map(id, entries))
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._resolve(bucket, entries)
            answer = known
            if answer.hit:
                self.counts.hit(bucket, answer.hit)
            else:
                self.counts.missed(bucket, answer.miss)
        try:
            answer.ready.built.plan()
        except Exception as error:
            if answer.variant == self.defaults:
                raise
            return self._without(bucket, answer.variant, error)
        return answer.ready

    def _without(self, bucket: int, variant: Variant, error: Exception) -> Ready:
        """The default, planned. A variant that cannot plan has launched nothing yet, and is not used again."""
        # Another graph on this rank alone would be a wrong one: an all-reduce that a graph has captured may read
        # buffers of the graphs that the other ranks captured at that time. What plan() refuses, it mostly refuses on
        # all ranks alike, in this same step. Only then do they meet here; it costs other steps nothing.
        self.ranks.share(f"bucket {bucket}: {named(variant)} could not plan", None, ONE_STEP_S)
        del self.ready[bucket, variant]
        self._known.clear()
        self.counts.missed(bucket, f"{named(variant)} could not plan: {one_line(error)}")
        ready = self._default[bucket].ready
        ready.built.plan()
        return ready

    def _resolve(self, bucket: int, entries: Sequence[PlanEntry | None]) -> _Answer:
        variant = tuple(
            choice.default if entry is None else Candidate(entry.backend, entry.tactic)
            for entry, choice in zip(entries, self.choices, strict=True)
        )
        ready = self.ready.get((bucket, variant))
        outside = [
            choice.unmeasured(bucket) or OUTSIDE
            for entry, choice in zip(entries, self.choices, strict=True)
            if entry is None and choice.table is not None
        ]
        miss = outside[0] if outside else "" if ready else f"{named(variant)} is planned and not available"
        if ready is None:
            return _Answer(self.defaults, self._default[bucket].ready, miss=miss)
        return _Answer(variant, ready, "" if miss else named(variant), miss)

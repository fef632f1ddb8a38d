"""Which captured variant serves a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dispatch._core import PlanEntry
from dispatch.candidate import Candidate
from dispatch.engine.capture import Ready
from dispatch.engine.choose import Choice
from dispatch.engine.counts import Counts
from dispatch.engine.prepare import OUTSIDE
from dispatch.engine.report import named
from dispatch.engine.variants import Variant
from dispatch.errors import one_line


class Serving:
    """The groups' plans and what is captured for them. Counts every step."""

    def __init__(self, choices: Sequence[Choice], ready: Mapping[tuple[int, Variant], Ready], counts: Counts) -> None:
        """`ready`: by bucket and variant, every bucket's default among them."""
        self.choices, self.ready, self.counts = tuple(choices), dict(ready), counts
        self.defaults: Variant = tuple(choice.default for choice in choices)
        self._tables = [choice.table for choice in choices]
        self._has_plan = any(table is not None for table in self._tables)
        # By bucket and the entries' identities, which live as long as their tables: to hash one would make its strings.
        self._known: dict[tuple[int, ...], tuple[Variant, str, str]] = {}

    def choose(self, bucket: int, batch: tuple[int, int, int]) -> Variant:
        """The variant that the plans name for (live rows, mean KV, max KV), where it is captured; else the default.

        A few calls and no more: in a step that follows milliseconds of other work, every line of Python here is cold.
        """
        if not self._has_plan:
            return self.defaults
        entries = [None if table is None else table.lookup(*batch) for table in self._tables]
        key = (bucket, *map(id, entries))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._resolve(bucket, entries)
        variant, hit, miss = known
        if hit:
            self.counts.hit(bucket, hit)
        else:
            self.counts.missed(bucket, miss)
        return variant

    def planned(self, bucket: int, variant: Variant) -> Ready:
        """After plan(), where needed. A variant that cannot plan has launched nothing yet, and is not used again."""
        ready = self.ready[bucket, variant]
        try:
            ready.built.plan()
        except Exception as error:
            if variant == self.defaults:
                raise
            del self.ready[bucket, variant]
            self._known.clear()
            self.counts.missed(bucket, f"{named(variant)} could not plan: {one_line(error)}")
            ready = self.ready[bucket, self.defaults]
            ready.built.plan()
        return ready

    def _resolve(self, bucket: int, entries: Sequence[PlanEntry | None]) -> tuple[Variant, str, str]:
        """The variant to serve with, and what is counted: a hit, or a miss."""
        variant = tuple(
            choice.default if entry is None else Candidate(entry.backend, entry.tactic)
            for entry, choice in zip(entries, self.choices, strict=True)
        )
        is_ready = (bucket, variant) in self.ready
        served = variant if is_ready else self.defaults
        if any(entry is None and table is not None for entry, table in zip(entries, self._tables, strict=True)):
            return served, "", OUTSIDE
        return (
            (served, named(variant), "") if is_ready else (served, "", f"{named(variant)} is planned and not available")
        )

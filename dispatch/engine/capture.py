"""Capturing every bucket's default, the largest bucket first, then the plans' variants within a budget.

All ranks go through the same list together, and a variant is kept on all or on none: a graph may hold collective calls,
and those may point at buffers of the graph that the other ranks captured at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from dispatch.engine.buffers import StepBuffers
from dispatch.engine.builder import Builder, BuiltStep
from dispatch.engine.checked import disagreement, row_lengths
from dispatch.engine.graphs import Graphs, Work
from dispatch.engine.output import tensors
from dispatch.engine.ranks import Ranks
from dispatch.engine.rehearsal import rehearse
from dispatch.engine.report import CaptureReport, VariantReport, named
from dispatch.engine.variants import GAINS_LESS, MOST_EXTRA, Variant
from dispatch.errors import one_line

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ready:
    """A step that can be replayed. Holds all that its graph points at."""

    built: BuiltStep
    replay: Work


class _Dropped(Exception):
    """What was tried is not to be used on any rank; the message says why."""


class Capturer:
    """Fills `ready`, by bucket and variant, and the report.

    What a backend raises is met on all ranks before any of them runs the engine's step with it. What the engine's own
    step raises on one rank alone leaves the others waiting in its collective calls, until those time out.
    """

    def __init__(
        self,
        builder: Builder,
        buffers: StepBuffers,
        graphs: Graphs,
        defaults: Variant,
        report: CaptureReport,
        ranks: Ranks,
    ) -> None:
        self.builder, self.buffers, self.graphs = builder, buffers, graphs
        self.defaults, self.report, self.ranks = defaults, report, ranks
        self.ready: dict[tuple[int, Variant], Ready] = {}

    def capture(
        self, wanted: Mapping[int, Sequence[Variant]], budget_s: float, budget_mib: float
    ) -> dict[tuple[int, Variant], Ready]:
        """The default of every bucket in `wanted`, then MOST_EXTRA of its other variants, the first ones that can be
        had, until a budget ends on any rank.

        `wanted` is the same on every rank. Raises what a default raises that cannot even be built, what the engine's
        step raises, and RanksError.
        """
        self.builder.reserve([(bucket, self.defaults) for bucket in wanted])
        extras = {bucket: [v for v in wanted[bucket] if self._reserved(bucket, v)] for bucket in wanted}
        for bucket in sorted(wanted, reverse=True):
            self._default(bucket)
        for bucket in sorted(wanted, reverse=True):
            captured = 0
            for variant in extras[bucket]:
                if captured == MOST_EXTRA:
                    self.report.variants.append(VariantReport(bucket, named(variant), False, dropped=GAINS_LESS))
                    continue
                spent = [v for v in self.report.variants if not v.is_default]
                ended = sum(v.seconds for v in spent) >= budget_s or sum(v.mib for v in spent) >= budget_mib
                why = "the capture budget has ended" if ended else ""
                why = self.ranks.agreed(f"{_at(bucket, variant)}: is there budget left", why)
                if why:
                    self._drop(bucket, variant, why)
                else:
                    captured += self._extra(bucket, variant)
        return self.ready

    def _reserved(self, bucket: int, variant: Variant) -> bool:
        """Whether there is scratch for it: all is sized before anything is captured, and never grows."""
        try:
            self._together(f"{_at(bucket, variant)}: scratch", lambda: self.builder.reserve([(bucket, variant)]))
        except _Dropped as dropped:  # a planned backend that is gone, or breaks its word, loses itself alone
            self._drop(bucket, variant, str(dropped))
            return False
        return True

    def _default(self, bucket: int) -> None:
        start, before, at = perf_counter(), self.graphs.free_mib(), f"bucket {bucket}: the default"
        built = self._build(bucket, self.defaults)
        self._load(built, self.defaults)
        self.ranks.share(f"{at} is built", None)  # where it is not, that rank has given up
        tensors(built.work())  # the engine's own step: what it raises is the engine's to hear
        try:
            replay = self._together(f"{at} is captured", lambda: self.graphs.capture(built.work))
            self._checked(at, built, replay, built, self.defaults)
            wrong = ""
        except _Dropped as dropped:  # it is the engine's own kernel: it serves, if not from a graph
            replay, wrong = built.work, str(dropped)
            _log.error("bucket %d: the default's graph is not used, it runs eagerly: %s", bucket, wrong)
        self.ready[bucket, self.defaults] = Ready(built, replay)
        self._report(bucket, self.defaults, start, before, wrong)

    def _extra(self, bucket: int, variant: Variant) -> bool:
        """Whether it is captured."""
        eager, start, before = self.ready[bucket, self.defaults].built, perf_counter(), self.graphs.free_mib()
        at = _at(bucket, variant)

        def rehearsed() -> BuiltStep:
            built = self._build(bucket, variant)
            rehearse(built, eager, self.buffers, self._lengths(variant))
            return built

        try:  # whatever a backend raises, it loses itself alone
            built = self._together(f"{at} is built", rehearsed)
            replay = self._together(f"{at} is captured", lambda: self.graphs.capture(built.work))
            self._checked(at, built, replay, eager, variant, "another output than the default's: ")
        except _Dropped as dropped:
            why = str(dropped)
        else:
            why = ""
            self.ready[bucket, variant] = Ready(built, replay)
        self._report(bucket, variant, start, before, why)
        return not why

    def _checked(
        self, at: str, built: BuiltStep, replay: Work, eager: BuiltStep, variant: Variant, wrong_is: str = ""
    ) -> None:
        """Raises _Dropped where its output is not the eager step's on every rank."""
        lengths = self._lengths(variant)
        wrong = self._together(f"{at} has run", lambda: disagreement(built, replay, eager, self.buffers, lengths))
        why = self.ranks.agreed(f"{at} is right", wrong_is + wrong if wrong else "")
        if why:
            raise _Dropped(why)

    def _together(self, at: str, work: Callable[[], T]) -> T:
        """What `work` returned, once all ranks have done it. Raises _Dropped on all of them if it raised on one."""
        why, result = "", []
        try:
            result.append(work())
        except Exception as error:
            why = one_line(error)
        why = self.ranks.agreed(at, why)
        if why:
            raise _Dropped(why)
        return result[0]

    def _build(self, bucket: int, variant: Variant) -> BuiltStep:
        return self.builder.build(bucket, variant, self.buffers.inputs(bucket))

    def _lengths(self, variant: Variant) -> list[int]:
        """Of two pages, of half, and of all of the longest that the variant serves."""
        page = max(group.spec.page_size for group in self.builder.groups)
        longest = min(map(self.builder.longest, variant))
        return sorted({min(n, longest) for n in (2 * page, longest // 2, longest)})

    def _load(self, built: BuiltStep, variant: Variant) -> None:
        """The longest rows, which the step is captured with; all change afterwards."""
        self.buffers.reserve(built.bucket, row_lengths(built, self._lengths(variant)[-1]))
        built.plan()

    def _report(self, bucket: int, variant: Variant, start: float, free_mib: float, dropped: str) -> None:
        mib = max(0.0, free_mib - self.graphs.free_mib())
        seconds = perf_counter() - start
        is_default = variant == self.defaults
        self.report.variants.append(VariantReport(bucket, named(variant), is_default, seconds, mib, dropped))
        if dropped and not is_default:
            _log.warning("bucket %d: %s is not used: %s: the default serves it", bucket, named(variant), dropped)

    def _drop(self, bucket: int, variant: Variant, why: str) -> None:
        self._report(bucket, variant, perf_counter(), self.graphs.free_mib(), why)


def _at(bucket: int, variant: Variant) -> str:
    return f"bucket {bucket}: {named(variant)}"

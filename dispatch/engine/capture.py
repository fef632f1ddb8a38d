"""Capturing every bucket's default, the largest bucket first, then the plans' variants within a budget."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from dispatch.engine.buffers import StepBuffers
from dispatch.engine.builder import Builder, BuiltStep
from dispatch.engine.checked import disagreement, row_lengths
from dispatch.engine.graphs import Graphs, Work
from dispatch.engine.output import tensors
from dispatch.engine.report import CaptureReport, VariantReport, named
from dispatch.engine.variants import Variant
from dispatch.errors import one_line

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """A step that can be replayed. Holds all that its graph points at."""

    built: BuiltStep
    replay: Work


class Capturer:
    """Fills `ready`, by bucket and variant, and the report."""

    def __init__(
        self, builder: Builder, buffers: StepBuffers, graphs: Graphs, defaults: Variant, report: CaptureReport
    ) -> None:
        self.builder, self.buffers, self.graphs = builder, buffers, graphs
        self.defaults, self.report = defaults, report
        self.ready: dict[tuple[int, Variant], Ready] = {}

    def capture(
        self, wanted: Mapping[int, Sequence[Variant]], budget_s: float, budget_mib: float
    ) -> dict[tuple[int, Variant], Ready]:
        """The default of every bucket in `wanted`, then its other variants until a budget ends.

        Raises what a default raises that cannot even be built.
        """
        self.builder.reserve([(bucket, self.defaults) for bucket in wanted])
        extras = {bucket: [v for v in wanted[bucket] if self._reserved(bucket, v)] for bucket in wanted}
        for bucket in sorted(wanted, reverse=True):
            self._default(bucket)
        for bucket in sorted(wanted, reverse=True):
            for variant in extras[bucket]:
                spent = [v for v in self.report.variants if not v.is_default]
                if sum(v.seconds for v in spent) >= budget_s or sum(v.mib for v in spent) >= budget_mib:
                    self._drop(bucket, variant, "the capture budget has ended")
                else:
                    self._extra(bucket, variant)
        return self.ready

    def _reserved(self, bucket: int, variant: Variant) -> bool:
        """Whether there is scratch for it: all is sized before anything is captured, and never grows."""
        try:
            self.builder.reserve([(bucket, variant)])
        except Exception as error:  # a planned backend that is gone, or breaks its word, loses itself alone
            self._drop(bucket, variant, one_line(error))
            return False
        return True

    def _default(self, bucket: int) -> None:
        start, before = perf_counter(), self.graphs.free_mib()
        built = self._build(bucket, self.defaults)
        self._load(built, self.defaults)
        tensors(built.work())  # the engine's own step: what it raises is the engine's to hear
        try:
            replay = self.graphs.capture(built.work)
            wrong = disagreement(built, replay, built, self.buffers, self._lengths(self.defaults))
        except Exception as error:  # it is the engine's own kernel: it serves, if not from a graph
            wrong = one_line(error)
        if wrong:
            replay = built.work
            _log.error("bucket %d: the default's graph is not used, it runs eagerly: %s", bucket, wrong)
        self.ready[bucket, self.defaults] = Ready(built, replay)
        self._report(bucket, self.defaults, start, before, wrong)

    def _extra(self, bucket: int, variant: Variant) -> None:
        eager, start, before = self.ready[bucket, self.defaults].built, perf_counter(), self.graphs.free_mib()
        try:
            built = self._build(bucket, variant)
            self._load(built, variant)
            replay = self.graphs.capture(built.work)
            wrong = disagreement(built, replay, eager, self.buffers, self._lengths(variant))
        except Exception as error:  # whatever a backend raises, it loses itself alone
            why = one_line(error)
        else:
            why = f"another output than the default's: {wrong}" if wrong else ""
        if not why:
            self.ready[bucket, variant] = Ready(built, replay)
        self._report(bucket, variant, start, before, why)

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

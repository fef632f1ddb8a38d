"""Capturing every bucket's default, the largest bucket first, then the plans' variants within a budget."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from dispatch.engine.buffers import StepBuffers
from dispatch.engine.builder import Builder, BuiltStep
from dispatch.engine.checked import disagreement
from dispatch.engine.graphs import Captured, Graphs
from dispatch.engine.report import CaptureReport, VariantReport, named
from dispatch.engine.variants import Variant
from dispatch.errors import one_line

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """A step that can be replayed. Holds all that its graph points at."""

    built: BuiltStep
    captured: Captured

    def run(self) -> Any:
        """Plan on the host where needed, then replay."""
        self.built.plan()
        return self.captured.replay()


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
        built = self._build(bucket, self.defaults)
        try:
            captured = self._captured(built, self.defaults)
            wrong = disagreement(built, captured, built, self.buffers, self._lengths(self.defaults))
        except Exception as error:  # it is the engine's own kernel: it serves, if not from a graph
            captured, wrong = Captured(built.work, 0.0, 0.0), one_line(error)
        if wrong:
            captured = Captured(built.work, captured.seconds, captured.mib)
            _log.error("bucket %d: the default's graph is not used, it runs eagerly: %s", bucket, wrong)
        self.ready[bucket, self.defaults] = Ready(built, captured)
        self.report.variants.append(
            VariantReport(bucket, named(self.defaults), True, captured.seconds, captured.mib, wrong)
        )

    def _extra(self, bucket: int, variant: Variant) -> None:
        eager, start = self.ready[bucket, self.defaults].built, perf_counter()
        mib = 0.0
        try:
            built = self._build(bucket, variant)
            captured = self._captured(built, variant)
            mib = captured.mib
            wrong = disagreement(built, captured, eager, self.buffers, self._lengths(variant))
        except Exception as error:  # whatever a backend raises, it loses itself alone
            why = one_line(error)
        else:
            why = f"another output than the default's: {wrong}" if wrong else ""
        if why:
            self._drop(bucket, variant, why, perf_counter() - start, mib)
            return
        self.ready[bucket, variant] = Ready(built, captured)
        seconds = perf_counter() - start
        self.report.variants.append(VariantReport(bucket, named(variant), False, seconds, mib))

    def _build(self, bucket: int, variant: Variant) -> BuiltStep:
        return self.builder.build(bucket, variant, self.buffers.inputs(bucket))

    def _lengths(self, variant: Variant) -> list[int]:
        """Of a page, of half, and of all of the longest that the variant serves; whole pages of every group."""
        page = math.lcm(*(group.spec.page_size for group in self.builder.groups))
        longest = min((c.max_kv or self.builder.max_seq_len) for c in variant)
        return sorted({max(1, min(n, longest) // page) * page for n in (page, longest // 2, longest)})

    def _captured(self, built: BuiltStep, variant: Variant) -> Captured:
        self.buffers.reserve(len(built.inputs[0].lengths_host), self._lengths(variant)[-1])
        built.plan()
        return self.graphs.capture(built.work)

    def _drop(self, bucket: int, variant: Variant, why: str, seconds: float = 0.0, mib: float = 0.0) -> None:
        self.report.variants.append(VariantReport(bucket, named(variant), False, seconds, mib, why))
        _log.warning("bucket %d: %s is not used: %s: the default serves it", bucket, named(variant), why)

"""DecodeGraphRunner: choose, capture and replay an engine's decode steps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

import torch

from dispatch.backends import Registry, registry
from dispatch.bench.trace import Trace
from dispatch.candidate import Candidate
from dispatch.config import DispatchConfig
from dispatch.device import current_device
from dispatch.engine.buffers import StepBuffers
from dispatch.engine.builder import Builder, Step
from dispatch.engine.capture import Capturer, Ready
from dispatch.engine.checked import tensors
from dispatch.engine.choose import Choice, choose
from dispatch.engine.counts import Counts
from dispatch.engine.graphs import CudaGraphs, EagerSteps, Graphs
from dispatch.engine.groups import EngineFacts, LayerGroup
from dispatch.engine.guards import start_refusal, step_refusal
from dispatch.engine.prepare import ABOVE_BUCKETS, OUTSIDE, look_up
from dispatch.engine.report import CaptureReport, named
from dispatch.engine.variants import Variant, extra_variants
from dispatch.errors import ConfigError
from dispatch.request import TuneRequest
from dispatch.traits import EngineTraits

_log = logging.getLogger(__name__)


class DecodeGraphRunner:
    """Made between an engine's model and its graphs. Nothing is measured or captured before `trigger_init_capture`."""

    def __init__(
        self,
        step: Step,
        groups: Sequence[LayerGroup],
        buckets: Sequence[int],
        max_seq_len: int,
        kv_capacity: int,
        config: DispatchConfig,
        *,
        reserved_page: int,
        facts: EngineFacts | None = None,
        traits: EngineTraits | None = None,
        default: str | None = None,
        trace: Trace | None = None,
        device: str | None = None,
        backends: Registry = registry,
    ) -> None:
        """`step`: the engine's. `groups`: its layers. `buckets`: batch sizes to capture, ascending. `max_seq_len`:
        tokens of the longest request. `kv_capacity`: KV tokens that the engine holds. `reserved_page`: of the
        engine's pool, given to no request. `default`: the backend that the engine would use; None: the first eligible
        one. `device`: "cpu" to try it out there; None: CUDA, and without it, the default on a CPU.

        Raises ConfigError for sizes that cannot be served.
        """
        if not groups:
            raise ConfigError("a runner needs a layer group")
        self.step, self.groups, self.config = step, tuple(groups), config
        self.facts, self.reserved_page, self.backends = facts or EngineFacts(), reserved_page, backends
        self.request = TuneRequest(
            groups[0].spec,
            tuple(buckets),
            max_seq_len,
            kv_capacity,
            config,
            self.facts.named_backend or default,
            trace,
            traits or EngineTraits(),
        )
        self.fingerprint = current_device(device)
        self.has_cuda = self.fingerprint.kind == "cuda" or device == "cpu"  # on a CPU only where that is asked for
        self.device = torch.device(self.fingerprint.kind)
        self.counts = Counts()
        self.report: CaptureReport | None = None

    def trigger_init_capture(self) -> CaptureReport:
        """Load the plan or tune, build, capture the largest bucket first, check. A second call does nothing more.

        Call it before the first request, while the engine's own buffers hold the same in every row. Raises MeasureError
        where not even a default serves a group, and what a default raises that cannot be built.
        """
        if self.report is not None:
            return self.report
        refusal = start_refusal(self.config, self.facts, self.has_cuda)
        if refusal and self.config.enabled:
            _log.warning("the default serves every step: %s", refusal)
        buckets, longest = self.request.buckets, self.request.max_seq_len
        self.choices = choose(self.groups, self.request, self.fingerprint, self.backends, refusal)
        self._free_what_tuning_left()
        self.defaults: Variant = tuple(choice.default for choice in self.choices)
        self.buffers = StepBuffers(self.groups, buckets, longest, self.reserved_page, self.device)
        report = CaptureReport(refusal, named(self.defaults), [choice.why for choice in self.choices])
        builder = Builder(self.step, self.groups, longest, self.backends, self.device)
        capturer = Capturer(builder, self.buffers, self._graphs(), self.defaults, report)
        plans = [choice.plan for choice in self.choices]
        wanted = {bucket: extra_variants(plans, self.defaults, bucket) for bucket in buckets}
        self.ready = capturer.capture(wanted, self.config.capture_budget_s, self.config.capture_budget_mib)
        self.report = report
        for line in report.lines():
            _log.info("%s", line)
        return report

    def serves(self, prefill: bool = False, query_tokens: int = 1, shared_prefix: bool = False) -> bool:
        """Whether `run` may serve a step of this kind. If not, the engine's own path does: counted, and logged once."""
        reason = step_refusal(prefill, query_tokens, shared_prefix)
        if reason:
            self.counts.missed(0, reason)
        return not reason

    def run(
        self, lengths_host: torch.Tensor, block_tables: Sequence[torch.Tensor], lengths: torch.Tensor | None = None
    ) -> Any:
        """One decode step: what the engine's step returned, cut to the live rows.

        The engine has filled its own buffers of the step. lengths_host: int32 [live], KV tokens with the new one, on
        the host. block_tables: of each layer group, int32 [live, pages], on the device. lengths: int32 [live], on the
        device, where the host knows only upper bounds. Raises ConfigError before `trigger_init_capture`, for an empty
        batch, and for a request longer than was captured for.
        """
        if self.report is None:
            raise ConfigError("a step before trigger_init_capture()")
        live = len(lengths_host)
        if live == 0:
            raise ConfigError("a step without requests")
        bucket = next((b for b in self.request.buckets if b >= live), 0)
        if not bucket:
            return self._above_the_buckets(lengths_host, block_tables, lengths)
        self.buffers.refresh(bucket, lengths_host, block_tables, lengths)
        return _rows(self._choose(bucket, lengths_host).run(), live)

    def _choose(self, bucket: int, lengths_host: torch.Tensor) -> Ready:
        """The variant that the plans name for these lengths, where it is captured; else the default."""
        default = self.ready[bucket, self.defaults]
        if all(choice.table is None for choice in self.choices):
            return default
        found = [self._planned(choice, lengths_host) for choice in self.choices]
        variant = tuple(one or choice.default for one, choice in zip(found, self.choices, strict=True))
        ready = self.ready.get((bucket, variant))
        if None in found:
            self.counts.missed(bucket, OUTSIDE)
        elif ready is None:
            self.counts.missed(bucket, f"{named(variant)} is planned and not available")
        else:
            self.counts.hit(bucket, named(variant))
        return ready or default

    def _planned(self, choice: Choice, lengths_host: torch.Tensor) -> Candidate | None:
        """What a group's plan names for these lengths; the default of a group without a plan; None without an entry."""
        if choice.table is None:
            return choice.default
        entry = look_up(choice.table, lengths_host)
        return None if entry is None else Candidate(entry.backend, entry.tactic)

    def _above_the_buckets(
        self, lengths_host: torch.Tensor, block_tables: Sequence[torch.Tensor], lengths: torch.Tensor | None
    ) -> Any:
        """Eagerly, with the default, over buffers and scratch for this batch alone."""
        self.counts.missed(0, ABOVE_BUCKETS)
        live, longest = len(lengths_host), self.request.max_seq_len
        buffers = StepBuffers(self.groups, (live,), longest, self.reserved_page, self.device)
        builder = Builder(self.step, self.groups, longest, self.backends, self.device)
        builder.reserve([(live, self.defaults)])
        built = builder.build(live, self.defaults, buffers.inputs(live))
        buffers.refresh(live, lengths_host, block_tables, lengths)
        built.plan()
        return built.work()

    def _graphs(self) -> Graphs:
        return CudaGraphs(self.device) if self.device.type == "cuda" else EagerSteps()

    def _free_what_tuning_left(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(output: Any, live: int) -> Any:
    """The first rows of one tensor, or of each of several."""
    return output[:live] if isinstance(output, torch.Tensor) else tuple(t[:live] for t in tensors(output))

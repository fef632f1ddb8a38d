"""DecodeGraphRunner: choose, capture and replay an engine's decode steps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dispatch.backends import Registry, registry
from dispatch.bench.trace import Trace
from dispatch.config import DispatchConfig
from dispatch.device import current_device
from dispatch.engine.above import AboveBuckets
from dispatch.engine.buffers import StepBuffers
from dispatch.engine.builder import Builder, Step
from dispatch.engine.capture import Capturer
from dispatch.engine.choose import choose, patience_s
from dispatch.engine.counts import Counts
from dispatch.engine.graphs import CudaGraphs, EagerSteps, Graphs
from dispatch.engine.groups import EngineFacts, LayerGroup, check_layers
from dispatch.engine.guards import start_refusal, step_refusal
from dispatch.engine.output import rows
from dispatch.engine.prepare import ABOVE_BUCKETS, batch_of
from dispatch.engine.ranks import Ranks
from dispatch.engine.report import CaptureReport, named
from dispatch.engine.serving import Serving
from dispatch.engine.variants import Variant, extra_variants
from dispatch.errors import ConfigError
from dispatch.request import TuneRequest
from dispatch.traits import EngineTraits

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger(__name__)


class DecodeGraphRunner:
    """Made between an engine's model and its graphs. Nothing is measured or captured before `trigger_init_capture`.

    Let go of it before the engine ends its process group: NCCL waits there for every graph that has captured its calls.
    """

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
        traces: Sequence[Trace] = (),
        device: str | None = None,
        backends: Registry = registry,
        cpu_group: ProcessGroup | None = None,
    ) -> None:
        """`step`: the engine's. `groups`: its layers. `buckets`: batch sizes to capture, ascending. `max_seq_len`:
        tokens of the longest request. `kv_capacity`: KV tokens that the engine holds. `reserved_page`: of the
        engine's pool, given to no request. `default`: the backend that the engine would use; None: the first eligible
        one. `device`: "cpu" to try it out there; None: CUDA, and without it, the default on a CPU. `cpu_group`: the
        ranks that run this step together, with gloo, beside whatever the step itself calls; None: one rank.

        Raises ConfigError for sizes that cannot be served.
        """
        check_layers(groups)
        self.step, self.groups, self.config = step, tuple(groups), config
        self.facts, self.reserved_page, self.backends = facts or EngineFacts(), reserved_page, backends
        named = self.facts.named_backend
        self.request = TuneRequest(
            groups[0].spec,
            tuple(buckets),
            max_seq_len,
            kv_capacity,
            config,
            named if named in backends.names() else default,
            tuple(traces),
            traits or EngineTraits(),
        )
        self.fingerprint = current_device(device)
        self.has_cuda = self.fingerprint.kind == "cuda" or device == "cpu"  # on a CPU only where that is asked for
        # with its index: another thread of the engine may have another current device
        is_cuda = self.fingerprint.kind == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        self.ranks = Ranks(cpu_group, patience_s(config))
        self.counts = Counts()
        self.report: CaptureReport | None = None
        self._served = False

    def trigger_init_capture(self) -> CaptureReport:
        """Load the plan or tune, build, capture the largest bucket first, check. A second call does nothing more.

        Call it on every rank, before the first request, with the same in every row of the engine's own buffers: where
        rows differ in what they write to the reserved page, the check of the graphs can compare less. Raises
        ConfigError once requests are being served, ConfigError and MeasureError where not even a default serves a
        group, what the engine's own step raises, and RanksError where another rank is gone or has given up.
        """
        if self._served:
            raise ConfigError("requests are being served: capture comes before the first of them")
        if self.report is None:
            with torch.inference_mode(False), torch.no_grad():  # or steps in another mode could not write the buffers
                try:
                    self.report = self._capture()
                except BaseException as error:
                    self.ranks.give_up(error)
                    raise
        return self.report

    def _capture(self) -> CaptureReport:
        refusal = start_refusal(self.config, self.facts, self.has_cuda)
        if refusal and self.config.enabled:
            _log.warning("the default serves every step: %s", refusal)
        buckets, longest = self.request.buckets, self.request.max_seq_len
        self.choices = choose(self.groups, self.request, self.fingerprint, self.backends, refusal, self.ranks)
        gc.collect()  # what tuning has left is not to lie in the engine's way
        defaults: Variant = tuple(choice.default for choice in self.choices)
        self.buffers = StepBuffers(self.groups, buckets, longest, self.reserved_page, self.device)
        report = CaptureReport(refusal, named(defaults), [choice.why for choice in self.choices])
        builder = Builder(self.step, self.groups, longest, self.backends, self.device)
        self.above = AboveBuckets(builder, defaults, self.reserved_page)
        graphs: Graphs = CudaGraphs(self.device) if self.device.type == "cuda" else EagerSteps()
        capturer = Capturer(builder, self.buffers, graphs, defaults, report, self.ranks)
        plans = [choice.plan for choice in self.choices]
        wanted = {bucket: extra_variants(plans, defaults, bucket) for bucket in buckets}
        ready = capturer.capture(wanted, self.config.capture_budget_s, self.config.capture_budget_mib)
        self.serving = Serving(self.choices, ready, self.counts, self.ranks)
        for line in report.lines():
            _log.info("%s", line)
        return report

    def serves(self, prefill: bool = False, query_tokens: int = 1, shared_prefix: bool = False) -> bool:
        """Whether `run` may serve a step of this kind. If not, the engine's own path does: counted, and logged once."""
        reason = step_refusal(prefill, query_tokens, shared_prefix)
        if reason:
            self.counts.missed(0, reason)
        return not reason

    @torch.no_grad()
    def run(
        self, lengths_host: torch.Tensor, block_tables: Sequence[torch.Tensor], lengths: torch.Tensor | None = None
    ) -> Any:
        """One decode step: what the engine's step returned, cut to the live rows; the next `run` overwrites it.

        The engine has filled its own buffers of the step, in place. lengths_host: int32 [live], KV tokens with the new
        one, on the host. block_tables: of each layer group, int32 [live, pages], on the device. lengths: int32 [live],
        on the device, where the host knows only upper bounds (EngineTraits.exact_lengths is False). One thread at a
        time. Raises ConfigError before `trigger_init_capture`, and for what was not captured for.
        """
        live, mean_kv, skew = self._checked(lengths_host, block_tables, lengths)
        self._served = True
        bucket = next((b for b in self.request.buckets if b >= live), 0)
        if not bucket:
            self.counts.missed(0, ABOVE_BUCKETS)
            return self.above.run(lengths_host, block_tables, lengths)
        self.buffers.refresh(bucket, lengths_host, block_tables, lengths)
        return rows(self.serving.choose(bucket, (live, mean_kv, skew)).replay(), live)

    def _checked(
        self, lengths_host: torch.Tensor, block_tables: Sequence[torch.Tensor], lengths: torch.Tensor | None
    ) -> tuple[int, int, int]:
        """Live rows, mean length and skew of a step that can be served."""
        if self.report is None:
            raise ConfigError("a step before trigger_init_capture()")
        if not len(lengths_host):
            raise ConfigError("a step without requests")
        live, mean_kv, skew, longest = batch_of(lengths_host)
        if longest > self.request.max_seq_len:
            raise ConfigError(f"a request of {longest} tokens: captured for {self.request.max_seq_len}")
        if lengths is not None and self.request.traits.exact_lengths:
            raise ConfigError("lengths on the device, by an engine whose EngineTraits say that the host's are exact")
        for group, table, mine in zip(self.groups, block_tables, self.buffers.tables, strict=True):
            pages, most = group.spec.max_pages(longest), mine.shape[1]
            if len(table) != live or not pages <= table.shape[1] <= most:
                raise ConfigError(
                    f"a block table of shape {list(table.shape)}: must be [{live}, {pages} to {most} pages]"
                )
        return live, mean_kv, skew

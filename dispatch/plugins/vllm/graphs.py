"""vLLM's full decode graphs, captured once more for each variant that a bucket's plan names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

from vllm.config.compilation import CUDAGraphMode

from dispatch.candidate import Candidate
from dispatch.config import DispatchConfig
from dispatch.engine.choose import Choice
from dispatch.engine.ranks import Ranks
from dispatch.engine.variants import GAINS_LESS, MOST_EXTRA, Variant, extra_variants
from dispatch.errors import one_line
from dispatch.plugins.vllm import log
from dispatch.plugins.vllm.decode import Decoder
from dispatch.plugins.vllm.memory import SPARE_MIB, free_mib


class Served:
    """The decoders of a model's layer groups, and the graphs of each variant beside the default's.

    A bucket's graphs cannot read lengths, but the host knows them before it replays one: so there is one for each
    variant, and `run` takes the one that the step's metadata was built for.

    `builders`: which have the decoders. `built_mib`: what their kernels hold. `spare_mib`: to be left free.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        builders: Sequence[Any],
        ranks: Ranks,
        config: DispatchConfig,
        built_mib: float = 0.0,
        spare_mib: float = SPARE_MIB,
    ) -> None:
        self.choices, self.builders, self.ranks, self.config = choices, builders, ranks, config
        self.built_mib, self.spare_mib = built_mib, spare_mib
        self.decoders: list[Decoder] = [builder.decoder for builder in builders]
        self.graphs: dict[tuple[Candidate | None, ...], dict[Any, Any]] = {}

    def capture(self, runner: Any, capture_model: Callable[[Any], int]) -> None:
        """Capture each bucket once more for each variant of it, and have `run` choose at each replay."""
        manager = runner.cudagraph_manager
        own, planned = manager.graphs, manager._capture_descs
        start, free = monotonic(), free_mib() + self.built_mib
        try:
            for variant, buckets in self._variants(decode_descs(planned)).items():
                over = self._over_time(monotonic() - start) or self.over_memory(free)
                if why := self.ranks.agreed("another variant is captured", over):
                    log.warning("decode-dispatch: %s and what follows keep the default: %s", _named(variant), why)
                    break
                forced = tuple(
                    None if c == choice.default else c for c, choice in zip(variant, self.choices, strict=True)
                )
                for decoder, candidate in zip(self.decoders, forced, strict=True):
                    decoder.forced = candidate
                wanted = [desc for desc in decode_descs(planned) if desc.num_reqs in buckets]
                manager.graphs, manager._capture_descs = {}, {CUDAGraphMode.FULL: wanted}
                try:
                    capture_model(runner)
                    failed = self.over_memory(free)
                except Exception as error:
                    failed = one_line(error)
                if why := self.ranks.agreed("another variant was captured", failed):
                    log.warning("decode-dispatch: %s and what follows keep the default: %s", _named(variant), why)
                    break
                self.graphs[forced] = manager.graphs
        except BaseException:
            self.graphs.clear()
            raise
        finally:
            manager.graphs, manager._capture_descs = own, planned
            for decoder in self.decoders:
                decoder.forced = None
            if not self.graphs:
                self.give_back()
        if not self.graphs:
            log.info("decode-dispatch: vLLM's own kernel serves every batch")
            return
        for i, decoder in enumerate(self.decoders):
            decoder.serve((desc.num_reqs, variant[i]) for variant, graphs in self.graphs.items() for desc in graphs)
        manager.run_fullgraph = functools.partial(self.run, manager, manager.run_fullgraph)
        mib, took = max(0.0, free - free_mib()), monotonic() - start  # other processes may give back meanwhile
        log.info("decode-dispatch: graphs beside the default's, in %.1f s and %d MiB: %s", took, mib, self.describe())

    def give_back(self) -> None:
        """Nothing serves: kernels and their scratch go."""
        self.decoders.clear()
        for builder in self.builders:
            builder.decoder = None

    def run(self, manager: Any, run_fullgraph: Any, desc: Any) -> Any:
        """The graph that was captured for what serves this step."""
        graphs = self.graphs.get(tuple(decoder.chosen for decoder in self.decoders))
        if graphs is None or desc not in graphs:  # of several layer groups, none knows what the others choose
            for decoder in self.decoders:
                if decoder.schedule is not None:
                    decoder.schedule()
            return run_fullgraph(desc)
        own, manager.graphs = manager.graphs, graphs
        try:
            return run_fullgraph(desc)
        finally:
            manager.graphs = own

    def describe(self) -> str:
        """What may serve which batch sizes beside the default."""
        return "; ".join(
            f"{_named(c or choice.default for c, choice in zip(variant, self.choices, strict=True))}"
            f" at {', '.join(str(desc.num_reqs) for desc in sorted(graphs, key=lambda desc: desc.num_reqs))}"
            for variant, graphs in self.graphs.items()
        )

    def _over_time(self, seconds: float) -> str:
        budget = self.config.capture_budget_s
        return f"the {budget:g} s for graphs are over" if seconds > budget else ""

    def over_memory(self, free_before_mib: float, to_come_mib: float = 0.0) -> str:
        """ "" or why there is too little for more. `free_before_mib`: before kernels were built. `to_come_mib`: what
        vLLM still takes before it serves."""
        free, budget = free_mib(), self.config.capture_budget_mib
        if free_before_mib - free > budget:
            return f"the {budget:g} MiB for graphs are over"
        needed = self.spare_mib + to_come_mib
        return "" if free > needed else f"{free:.0f} MiB are free, and vLLM needs {needed:.0f}"

    def _variants(self, descs: Sequence[Any]) -> dict[Variant, set[int]]:
        """Each variant, and the buckets that get a graph of it: what is first in a bucket first, the largest before."""
        defaults = tuple(choice.default for choice in self.choices)
        plans = [choice.plan for choice in self.choices]
        able = {}
        for bucket in sorted({desc.num_reqs for desc in descs}, reverse=True):
            able[bucket] = [
                variant
                for variant in extra_variants(plans, defaults, bucket)
                if all(
                    candidate == default or (bucket, candidate) in decoder.steps
                    for candidate, default, decoder in zip(variant, defaults, self.decoders, strict=True)
                )
            ]
        wanted: dict[Variant, set[int]] = {}
        for place in range(MOST_EXTRA):
            for bucket, its in able.items():
                if place < len(its):
                    wanted.setdefault(its[place], set()).add(bucket)
        for bucket, its in able.items():
            for variant in its[MOST_EXTRA:]:
                log.info("decode-dispatch: %s at %d keeps the default: %s", _named(variant), bucket, GAINS_LESS)
        return wanted


def decode_descs(planned: Mapping[Any, Sequence[Any]]) -> list[Any]:
    """Of what vLLM captures, the full graphs of decode steps: one token of each request."""
    return [desc for desc in planned.get(CUDAGraphMode.FULL, ()) if desc.uniform_token_count == 1]


def _named(variant: Iterable[Candidate]) -> str:
    return ", ".join(map(str, variant))

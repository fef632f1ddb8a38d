"""Where cases run: a device, a folder for plans that goes when all is done, and what a case hands back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dispatch.config import DispatchConfig
from dispatch.engine.prepare import batch_of
from dispatch.engine.runner import DecodeGraphRunner
from dispatch.engine.variants import GAINS_LESS
from dispatch.samples import Box
from smoke.engine import make_decoder, make_runner
from smoke.forced import asked, challengers, store_plan
from smoke.golden import Golden, read
from smoke.model import Decoder
from smoke.serve import serve
from smoke.tolerance import Tally, tally

# To tune a runner once. On a GPU kernels may have to be compiled first.
TIME_BUDGET_S = {"cpu": 20.0, "cuda": 120.0}


class Skipped(Exception):
    """This node cannot run the case; the message says why."""


@dataclass
class Found:
    """What a case found. `problems`: what is wrong beside the numbers that `tallies` compare. `facts`: for JSON."""

    tallies: list[Tally] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def require(self, holds: bool, otherwise: str) -> None:
        """Note a problem unless it holds."""
        if not holds:
            self.problems.append(otherwise)


@dataclass(frozen=True)
class Place:
    """`kind`: "cuda" or "cpu"."""

    kind: str
    folder: Path

    @property
    def device(self) -> torch.device:
        """As torch names it."""
        return torch.device(self.kind)

    def config(self, store: str, enabled: bool = True) -> DispatchConfig:
        """Settings with a store of this name: the same name, the same plans."""
        return DispatchConfig(enabled=enabled, cache_dir=self.folder / store, time_budget_s=TIME_BUDGET_S[self.kind])

    def challengers(self, decoder: Decoder) -> list[str]:
        """Backends beside the default. Raises Skipped where there is none."""
        found = challengers(decoder.cache.spec, self.config("none"), self.kind)
        if not found:
            raise Skipped("only the default serves this layer here")
        return found

    def default(self, decoder: Decoder) -> str:
        """The backend that serves where no plan does."""
        return asked(decoder.cache.spec, self.config("none"), self.kind).default

    def runner(self, decoder: Decoder, store: str, enabled: bool = True) -> DecodeGraphRunner:
        """A runner that measures, unless the store has a plan."""
        return make_runner(decoder, self.config(store, enabled))

    def planned(self, decoder: Decoder, store: str, boxes: Sequence[Box]) -> DecodeGraphRunner:
        """A runner whose plan is made by hand of these boxes."""
        config = self.config(store)
        store_plan(decoder.cache.spec, config, self.kind, boxes)
        return make_runner(decoder, config)

    def decoder(self, name: str) -> Decoder:
        """The model of a golden file."""
        return make_decoder(name, self.device)


@dataclass
class Ran:
    """`logits`: what `serve` returned. `means`: mean KV tokens of a request, rounded up, of each decode step."""

    logits: list[torch.Tensor]
    means: list[int]


def compare(
    found: Found,
    label: str,
    name: str,
    decoder: Decoder,
    runner: DecodeGraphRunner,
    goldens: Sequence[Golden] | None = None,
    joins: Sequence[int] | None = None,
    steps: int | None = None,
) -> Ran:
    """Serve goldens (all of the file, two more at every step, if none are given), and note how it went."""
    if goldens is None:
        goldens = read(name)
        joins = [order // 2 for order in range(len(goldens))]
    watched = _Watched(runner)
    logits = serve(decoder, watched, goldens, joins, steps)
    found.tallies.append(tally(name, goldens, logits))
    report = runner.report
    for variant in report.variants:
        fine = variant.dropped in ("", GAINS_LESS)  # a measured plan may name more than get a graph
        found.require(fine, f"bucket {variant.bucket}: {variant.variant} dropped: {variant.dropped}")
    found.facts[label] = {
        "hits": {f"{bucket} {what}": count for (bucket, what), count in sorted(runner.counts.hits.items())},
        "misses": {f"{bucket} {why}": count for (bucket, why), count in sorted(runner.counts.misses.items())},
        "capture": report.to_json(),
    }
    return Ran(logits, watched.means)


class _Watched:
    def __init__(self, runner: DecodeGraphRunner) -> None:
        self.runner = runner
        self.means: list[int] = []

    def run(self, lengths_host: torch.Tensor, block_tables: Sequence[torch.Tensor]) -> torch.Tensor:
        self.means.append(batch_of(lengths_host)[1])
        logits: torch.Tensor = self.runner.run(lengths_host, block_tables)
        return logits

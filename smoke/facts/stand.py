"""A test stand: one layer and batch size on a GPU, candidates recorded over the same pages and timed in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import monotonic

import numpy as np
import torch
from numpy.typing import NDArray

from dispatch.backends import DecodeImpl, registry
from dispatch.bench.chain_layers import layers_for
from dispatch.bench.cuda_timer import CudaTimer
from dispatch.bench.pool import PagedPool
from dispatch.bench.profiles import LogNormal
from dispatch.bench.sanity import check_bandwidth
from dispatch.bench.timer import Recording, StepTime
from dispatch.candidate import Candidate
from dispatch.errors import one_line
from dispatch.spec import AttentionSpec
from dispatch.workspace import Workspaces
from smoke.facts.bare import Bare

ROUNDS = 15
SEED = 2
WARM_UP_S = 0.3
# Short names for the table; the order in which the figures are printed.
BACKENDS = {"cudnn": "flashinfer_cudnn", "fa3": "fa3", "xqa": "flashinfer_xqa", "fa2_tc": "flashinfer_fa2_tc"}

Lengths = NDArray[np.int64]


def layer_of(num_qo_heads: int, num_kv_heads: int, kv_dtype: str = "bf16", page_size: int = 16) -> AttentionSpec:
    """A layer with heads of 128, in bf16."""
    return AttentionSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=128,
        head_dim_vo=128,
        page_size=page_size,
        num_layers=36,
        dtype="bf16",
        kv_dtype=kv_dtype,
    )


def drawn(sigma: float, batch: int, mean_kv: int, longest: int, rounds: int = ROUNDS) -> Lengths:
    """int64 [rounds, batch], log-normal (sigma 0: equal), scaled to the mean in each round, then clipped."""
    rng = np.random.default_rng([SEED, batch, mean_kv, round(10 * sigma)])
    lengths = LogNormal(sigma).lengths(rng, batch, np.full(rounds, float(mean_kv)), longest)
    return np.clip(np.rint(lengths), 1, longest).astype(np.int64)


@dataclass(frozen=True)
class Medians:
    """Median microseconds over the rounds: plan(), begin_step, one layer."""

    plan_us: float
    begin_us: float
    layer_us: float


Measured = Mapping[str, Mapping[str, Medians]]
"""By cell, by arm. An arm that failed is absent."""


class Stand:
    """Owns pages, scratch and recordings until it is dropped: nothing that a graph points at goes before that."""

    def __init__(
        self,
        timer: CudaTimer,
        spec: AttentionSpec,
        max_kv: int,
        cells: Mapping[str, Lengths],
        layers: int | None = None,
        tables: Sequence[int] = (),
    ) -> None:
        """`cells`: lengths [rounds, batch] by name. `layers`: of the chain, one of the timer's; as the harness if None.

        `tables`: further lengths to declare, for arms with a page table of that width.
        """
        self.timer, self.spec, self.max_kv, self.cells = timer, spec, max_kv, cells
        self.batch = next(iter(cells.values())).shape[1]
        self.layers = {name: layers or layers_for(spec, timer, lengths) for name, lengths in cells.items()}
        pages = max(int((-(-lengths // spec.page_size)).sum(axis=1).max()) for lengths in cells.values())
        self.pool = PagedPool(spec, pages, max(self.layers.values()), timer.device)
        self.inputs = {tokens: self.pool.inputs(self.batch, tokens) for tokens in (max_kv, *tables)}
        self.chain = self.pool.chain(self.batch)
        self.workspaces = Workspaces(timer.device)
        self.arms: dict[str, Recording] = {}
        self.failed: dict[str, str] = {}
        self._load(next(iter(cells.values()))[0])

    def scratch(self, family: str, size_bytes: int) -> torch.Tensor:
        """The family's own; the size it is first asked for with."""
        self.workspaces.reserve(family, size_bytes)
        return self.workspaces.get(family)

    def build(self, backend: str, max_kv: int | None = None, scratch_of: str | None = None) -> DecodeImpl:
        """A registered backend's implementation (or a candidate's). `scratch_of`: instead of the family's scratch."""
        candidate, tokens = Candidate.parse(backend), max_kv or self.max_kv
        served = registry.get(candidate.backend)
        size = served.workspace_bytes(self.spec, self.batch, tokens)
        scratch = self.scratch(scratch_of or served.family, size)
        return served.build(self.spec, self.batch, tokens, scratch, candidate.knobs)

    def add(self, name: str, build: Callable[[], DecodeImpl], max_kv: int | None = None) -> None:
        """Build and record as the harness does. An arm that cannot be is noted in `failed`."""
        inputs = self.inputs[max_kv or self.max_kv]
        self._add(name, lambda: self.timer.record(build(), inputs, self.chain))

    def add_bare(self, name: str, build: Callable[[], DecodeImpl], layers: int, product: bool = False) -> None:
        """As `add`, with nothing between the layers, or with a `product` alone."""
        inputs = self.inputs[self.max_kv]
        self._add(name, lambda: Bare(self.timer, build(), inputs, self.chain, layers, product))

    def measure(self) -> Measured:
        """Every arm once a round and cell, in shuffled order, on the same lengths."""
        self._warm_up()
        rng = np.random.default_rng([SEED, self.batch])
        times: dict[str, dict[str, list[StepTime]]] = {cell: {name: [] for name in self.arms} for cell in self.cells}
        for round_ in range(ROUNDS):
            for cell, lengths in self.cells.items():
                self._load(lengths[round_])
                for name in rng.permutation(list(self.arms)).tolist():
                    try:
                        time = self.arms[name].start(self.layers[cell])()
                        check_bandwidth(self.spec, lengths[round_], time.layer_us, self.timer.peak_bytes_per_s)
                        times[cell][name].append(time)
                    except Exception as error:
                        self._fail(f"{name}, {cell}", error)
        return {
            cell: {name: _medians(taken) for name, taken in arms.items() if len(taken) == ROUNDS}
            for cell, arms in times.items()
        }

    def differences(self, reference: str) -> dict[str, float]:
        """Root mean square difference of each arm's first output to the reference's, over that of the reference."""
        outs = {}
        for name in list(self.arms):
            self.chain.outs[0].fill_(float("nan"))
            if self._runs(name):
                outs[name] = self.chain.outs[0].float().clone()
        if reference not in outs:
            return {}
        scale = outs[reference].square().mean().sqrt()
        return {name: float((out - outs[reference]).square().mean().sqrt() / scale) for name, out in outs.items()}

    def notes(self) -> str:
        """What failed, for the table."""
        return "; ".join(f"{name} failed: {why}" for name, why in self.failed.items())

    def _add(self, name: str, record: Callable[[], Recording]) -> None:
        try:
            self.arms[name] = record()
        except Exception as error:
            self._fail(name, error)

    def _fail(self, what: str, error: Exception) -> None:
        self.failed[what] = one_line(error)

    def _load(self, lengths: Lengths) -> None:
        for inputs in self.inputs.values():
            self.pool.load(inputs, lengths)

    def _warm_up(self) -> None:
        end = monotonic() + WARM_UP_S
        while self.arms and monotonic() < end:
            for name in list(self.arms):
                self._runs(name)

    def _runs(self, name: str) -> bool:
        """Run an arm once; one that fails is no arm any more."""
        try:
            self.arms[name].run(1)
        except Exception as error:
            self._fail(name, error)
            del self.arms[name]
            return False
        return True


def _medians(times: Sequence[StepTime]) -> Medians:
    return Medians(*(statistics.median(asdict(t)[part] for t in times) for part in ("plan_us", "begin_us", "layer_us")))


def layer_us(arms: Mapping[str, Medians]) -> dict[str, float]:
    """Microseconds a layer by arm."""
    return {name: medians.layer_us for name, medians in arms.items()}


def raw(measured: Measured) -> dict[str, dict[str, dict[str, float]]]:
    """As plain data."""
    return {cell: {name: asdict(m) for name, m in arms.items()} for cell, arms in measured.items()}

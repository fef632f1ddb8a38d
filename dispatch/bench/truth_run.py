"""A run of `bench truth`: eligible backends, cells, a stack on the GPU, and every batch size in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dispatch.backends import Registry
from dispatch.bench.cuda_timer import CudaTimer
from dispatch.bench.memory import free_bytes
from dispatch.bench.model_stack import ModelStack
from dispatch.bench.profiles import LogNormal, PlannedCell, plan_cells
from dispatch.bench.rounds import ROUNDS
from dispatch.bench.truth import Truth, TruthCell
from dispatch.bench.truth_bench import Prepare, TruthBench
from dispatch.device import current_device
from dispatch.eligible import eligible
from dispatch.errors import ConfigError, MeasureError
from dispatch.hf_dense import DenseSizes
from dispatch.request import TuneRequest

SIGMA = 0.7  # as ragged as batches of production are


def run_truth(
    request: TuneRequest,
    sizes: DenseSizes,
    num_layers: int,
    mean_kvs: Sequence[int],
    registry: Registry,
    progress: Callable[[str], None],
) -> Truth:
    """Compare every backend with the default at each of the request's buckets and of `mean_kvs` (tokens, ascending).

    `sizes` are those of one rank; `num_layers` are the stack's; `progress` is told what is going on. Raises
    MeasureError where there is no CUDA device, where the default fails or there is nothing to compare it with, and
    where memory is short; ConfigError for mean lengths that cannot be measured.
    """
    fingerprint = current_device("cuda")
    able = eligible(request, fingerprint, registry)
    backends = tuple(able.tactics)
    if len(backends) == 1:
        raise MeasureError(f"{backends[0]} alone serves this layer: there is nothing to compare it with")
    planned = {batch: planned_cells(batch, mean_kvs, request.max_seq_len) for batch in request.buckets}
    device = torch.device("cuda")
    try:
        timer = CudaTimer(device)
        stack = ModelStack(request.spec, sizes, num_layers, request.max_seq_len, device)
        free, scratch = free_bytes(device), able.workspace_bytes
        bench = TruthBench(stack, planned, scratch, request.max_seq_len, registry, timer, captured(timer), free)
    except RuntimeError as error:  # torch's out-of-memory error is one
        raise MeasureError(f"no memory to measure with: {error}".splitlines()[0]) from None
    cells: list[TruthCell] = []
    for batch in request.buckets:
        progress(f"batch {batch}: {', '.join(backends)}")
        cells += bench.compare(batch, backends)
    return Truth(
        fingerprint.to_json(),
        request.spec,
        num_layers,
        able.default,
        tuple(cells),
        able.refused,
        tuple(bench.failed),
    )


def planned_cells(batch: int, mean_kvs: Sequence[int], max_kv: int) -> tuple[PlannedCell, ...]:
    """A cell for each mean length. Raises ConfigError where requests of at most `max_kv` tokens cannot have it."""
    cells = plan_cells(batch, mean_kvs, [LogNormal(SIGMA)], max_kv, batch * mean_kvs[-1], ROUNDS)
    missing = [str(kv) for kv in mean_kvs if kv not in {planned.cell.mean_kv for planned in cells}]
    if missing:
        raise ConfigError(f"mean KV {', '.join(missing)} at batch {batch}: too near the longest request, {max_kv}")
    return cells


def captured(timer: CudaTimer) -> Prepare:
    """Work in a CUDA graph of its own, with memory of its own."""

    def prepare(work: Callable[[], object]) -> Callable[[], float]:
        graph = timer.capture(work, torch.cuda.graph_pool_handle())
        return lambda: timer.replays_us([graph])[0]

    return prepare

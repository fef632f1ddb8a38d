"""Small valid specs, keys, samples and plans, and JSON with one value replaced."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dispatch.candidate import Candidate
from dispatch.conclude import conclude
from dispatch.decision import Rule
from dispatch.plan import StoredPlan
from dispatch.samples import PARTS, TWIN, BucketSamples, Cell, Samples
from dispatch.spec import AttentionSpec

CREATED = "2025-06-01T12:00:00+00:00"
ROUNDS = 15
CELLS = (
    Cell(128, 128, "equal"),
    Cell(128, 310, "lognormal-0.7"),
    Cell(1024, 1024, "equal"),
    Cell(1024, 2900, "lognormal-0.7"),
)
# Microseconds a layer in each of CELLS, the default first: the second is 20% faster at 128 and 20% slower at 1024.
LAYER_US: Mapping[str, Sequence[float]] = {"torch_sdpa": (10, 11, 40, 44), "torch_chunked": (8, 8.8, 48, 52.8)}

# A small model's config.json. Its weights, in elements: embeddings 1000 x 64; in each layer, attention 64 x (4 + 2) x
# (16 + 16), and an MLP of 64 x 128 x 3.
TINY: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


def make_spec(**changes: Any) -> AttentionSpec:
    """8/2 heads of 64, pages of 16 tokens, 4 layers."""
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64}
    return AttentionSpec(**{**sizes, "page_size": 16, "num_layers": 4, **changes})


def make_key(**changes: Any) -> dict[str, Any]:
    """A key with the fields of TuneRequest.key, as from a file."""
    return {
        "device": {"kind": "cpu", "name": "a CPU", "capability": [0, 0], "units": 1, "torch": "2.6.0"},
        "backends": dict.fromkeys(LAYER_US, "2.6.0"),
        "priority": list(LAYER_US),
        "default": next(iter(LAYER_US)),
        "exclude": [],
        "spec": make_spec().to_json(),
        "buckets": [1, 8],
        "grid": [128, 1024],
        "max_seq_len": 4096,
        "capacity": 8192,
        "profiles": ["equal", "lognormal-0.7"],
        "traces": {},
        "engine": {"plan_hidden": False, "finite_kv": False, "exact_lengths": True},
        "threshold": 0.03,
        "cluster_margin": 0.01,
        "rule_version": 4,
        **changes,
    }


def make_samples(
    layer_us: Mapping[str, Sequence[float]] = LAYER_US,
    *,
    cells: Sequence[Cell] = CELLS,
    buckets: Sequence[int] = (1, 8),
    rounds: int = ROUNDS,
    noise: float = 0.002,
    **changes: Any,
) -> Samples:
    """A run with a true time of a layer by candidate and cell, the default first, and 1 us of begin_step.

    `noise` is the standard deviation of the logarithm of each time; two calls give the same. `changes` are fields
    of Samples.
    """
    names = tuple(layer_us)
    default = Candidate.parse(names[0]).backend
    backends = list(dict.fromkeys(Candidate.parse(name).backend for name in names))
    key = make_key(buckets=list(buckets), backends=dict.fromkeys(backends, "2.6.0"), priority=backends, default=default)
    rng = np.random.default_rng(1)
    measured = []
    for bucket in buckets:
        layer = np.array([layer_us[name] for name in (names[0], *names)], dtype=np.float64)
        times = np.zeros((len(PARTS), len(names) + 1, len(cells), rounds))
        times[PARTS.index("begin_us")] = 1.0
        times[PARTS.index("layer_us")] = layer[:, :, None] * np.exp(rng.normal(0, noise, times.shape[1:]))
        order = (names[0], TWIN, *names[1:])
        longest = np.array([[cell.max_kv] * rounds for cell in cells])
        means = np.array([[cell.mean_kv] * rounds for cell in cells])
        measured.append(BucketSamples(bucket, tuple(cells), order, times.round(3), longest, means))
    fields = {"key": key, "num_layers": 4, "default": default, "priority": tuple(backends), "rule": Rule()}
    return Samples(**{**fields, "buckets": tuple(measured), **changes})


def make_plan(samples: Samples | None = None, **changes: Any) -> StoredPlan:
    """The plan of a run. `changes` are fields of StoredPlan."""
    plan = conclude(make_samples() if samples is None else samples, {"flashinfer_xqa": "needs a GPU"})
    return replace(plan, **{"created": CREATED, "seconds": 1.5, **changes})


def paths(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of plain data lies, the whole of it (an empty path) included."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in items:
        yield from paths(value, (*at, name))


def get_at(data: Any, at: Sequence[Any]) -> Any:
    """The value at a path."""
    for name in at:
        data = data[name]
    return data


def put_at(data: Any, at: Sequence[Any], value: Any) -> Any:
    """A copy of plain data with the value at a path replaced."""
    if not at:
        return value
    data = copy.deepcopy(data)
    get_at(data, at[:-1])[at[-1]] = value
    return data

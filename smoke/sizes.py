"""Sizes of the smoke models: small enough for a CPU, with heads and pages that the GPU kernels serve."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch.spec import AttentionSpec

EPSILON = 1e-6  # of every RMSNorm
ROPE_BASE = 10000.0
MAX_SEQ_LEN = 256  # tokens of the longest request: 16 pages
BUCKETS = (1, 2, 4, 8)
# Not 1, so that a kernel that drops a scale is found; powers of 2, so that dividing by them rounds nothing.
FP8_SCALES = {"k_scale": 0.25, "v_scale": 0.5}


@dataclass(frozen=True, slots=True)
class Sizes:
    """`middle`: of the MLP, or of each expert. `experts` 1: a dense MLP. `active`: experts that a token takes."""

    name: str
    layers: int = 3
    hidden: int = 256
    qo_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    vocab: int = 256
    middle: int = 512
    experts: int = 1
    active: int = 1
    seed: int = 0

    def spec(self, kv_dtype: str = "bf16", world: int = 1, dtype: str = "bf16") -> AttentionSpec:
        """The attention of one of `world` ranks."""
        return AttentionSpec(
            num_qo_heads=self.qo_heads // world,
            num_kv_heads=self.kv_heads // world,
            head_dim_qk=self.head_dim,
            head_dim_vo=self.head_dim,
            page_size=self.page_size,
            num_layers=self.layers,
            dtype=dtype,
            kv_dtype=kv_dtype,
            **(FP8_SCALES if kv_dtype == "fp8_e4m3" else {}),
        )


DENSE = Sizes("dense")
MOE = Sizes("moe", middle=256, experts=8, active=4, seed=1)

"""The matrix over which a kernel's eligibility is tested: a device, dtype pairs (Q, KV), groups and pages."""

from __future__ import annotations

from dispatch.device import DeviceFingerprint
from tests.fakes import spec_of

H200 = DeviceFingerprint("cuda", "NVIDIA H200", (9, 0), 132, "580.95", "13.0", "2.11.0")
PAIRS = [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8_e4m3"), ("fp16", "fp8_e4m3"), ("fp32", "fp32")]
GROUPS = (*range(1, 9), 16)
PAGES = (1, 8, 16, 32, 64, 128)


def layer(group=4, dim=128, page=16, **changes):
    """A bf16 layer of 2 KV heads."""
    sizes = {"num_qo_heads": 2 * group, "num_kv_heads": 2, "head_dim_qk": dim, "head_dim_vo": dim, "page_size": page}
    return spec_of(**{**sizes, "dtype": "bf16", "kv_dtype": "bf16", **changes})

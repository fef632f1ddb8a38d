"""AttentionSpec: everything about a layer's attention that a kernel may depend on."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

from dispatch.errors import SpecError
from dispatch.plainjson import shown

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1}
Q_DTYPES = ("bf16", "fp16", "fp32")
KV_LAYOUTS = ("NHD", "HND")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One layer group's attention, as a rank of the engine runs it.

    Head counts are those *of this rank*. K and V pages are two tensors, each [pages, page_size, num_kv_heads,
    head_dim] for kv_layout "NHD" and [pages, num_kv_heads, page_size, head_dim] for "HND".
    `kv_strides` are the strides of the first three of those dimensions in elements, where the engine's cache is
    not contiguous; the last dimension is always dense. Where the least of them is head_dim_qk + head_dim_vo, V lies
    behind K in each row of one tensor. `q_stride`: elements from one token's Q to the next one's, where Q is not dense,
    as a slice of the layer's product for Q, K and V is not. `sliding_window` counts tokens, the current one included.
    `logits_soft_cap` c turns a logit x into c * tanh(x / c). `has_sinks`: each query head has a learned logit
    that joins the softmax's denominator. A stored fp8 value times k_scale or v_scale is the real one.
    Raises SpecError, naming the field, for values that no layer can have.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    num_layers: int
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    kv_layout: str = "NHD"
    kv_strides: tuple[int, int, int] | None = None
    q_stride: int | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    sm_scale: float | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        for field in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "num_layers"):
            _positive_int(field, getattr(self, field))
        if self.num_qo_heads % self.num_kv_heads:
            raise SpecError(f"num_qo_heads={self.num_qo_heads} is not divisible by num_kv_heads={self.num_kv_heads}")
        for field in ("head_dim_qk", "head_dim_vo"):
            if getattr(self, field) % 8:  # a row of 16-bit values is read in units of 16 bytes
                raise SpecError(f"{field}={getattr(self, field)}: must be a multiple of 8")
        _one_of("dtype", self.dtype, Q_DTYPES)
        _one_of("kv_dtype", self.kv_dtype, (self.dtype, "fp8_e4m3"))
        _one_of("kv_layout", self.kv_layout, KV_LAYOUTS)
        if self.kv_strides is not None:
            if not isinstance(self.kv_strides, tuple) or len(self.kv_strides) != 3:
                raise SpecError(f"kv_strides={shown(self.kv_strides)}: must be a tuple of three strides, in elements")
            for stride in self.kv_strides:
                _positive_int("kv_strides", stride)
            self._check_overlap(self.kv_strides)
        if self.q_stride is not None:
            _positive_int("q_stride", self.q_stride)
            if self.q_stride < (width := self.num_qo_heads * self.head_dim_qk):
                raise SpecError(f"q_stride={self.q_stride}: tokens overlap, each has {width} elements")
        if self.sliding_window is not None:
            _positive_int("sliding_window", self.sliding_window)
        if self.sm_scale is None:
            object.__setattr__(self, "sm_scale", 1.0 / math.sqrt(self.head_dim_qk))
        capped = () if self.logits_soft_cap is None else ("logits_soft_cap",)
        for field in ("k_scale", "v_scale", "sm_scale", *capped):  # 1 and 1.0 are one spec, and one key
            object.__setattr__(self, field, _positive_float(field, getattr(self, field)))
        if not isinstance(self.has_sinks, bool):
            raise SpecError(f"has_sinks={shown(self.has_sinks)}: must be true or false")

    def _check_overlap(self, strides: tuple[int, int, int]) -> None:
        """Raises SpecError where two slots would lie on the same memory."""
        inner = (self.page_size, self.num_kv_heads)
        sizes = inner if self.kv_layout == "NHD" else inner[::-1]
        extent = max(self.head_dim_qk, self.head_dim_vo)
        stepped = (each for each in zip(strides[1:], sizes, strict=True) if each[1] > 1)  # torch: size 1, any stride
        for stride, size in (*sorted(stepped), (strides[0], 1)):
            if stride < extent:
                raise SpecError(f"kv_strides={strides}: slots overlap, a stride of {stride} onto {extent} elements")
            extent += stride * (size - 1)

    @property
    def group_size(self) -> int:
        """Query heads for each KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """The softmax scale; 1 / sqrt(head_dim_qk) unless given."""
        assert self.sm_scale is not None
        return self.sm_scale

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V for one token of one layer."""
        return self.num_kv_heads * (self.head_dim_qk + self.head_dim_vo) * DTYPE_BYTES[self.kv_dtype]

    @property
    def is_packed(self) -> bool:
        """Whether V lies behind K in each row of one tensor, as in vLLM's cache."""
        return self.kv_strides is not None and min(self.kv_strides) == self.head_dim_qk + self.head_dim_vo

    def max_pages(self, max_kv: int) -> int:
        """Pages of a request with `max_kv` tokens."""
        return -(-max_kv // self.page_size)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` gives an equal spec."""
        return {**asdict(self), "kv_strides": None if self.kv_strides is None else list(self.kv_strides)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AttentionSpec:
        """Inverse of `to_json`. Raises SpecError for fields that are missing, unknown or malformed."""
        try:
            strides = data.get("kv_strides")
            return cls(**{**data, "kv_strides": None if strides is None else tuple(strides)})
        except (TypeError, AttributeError) as error:
            raise SpecError(f"not an attention spec: {error}") from None

    def describe(self) -> str:
        """One line for tables and logs."""
        parts = [
            f"{self.num_qo_heads}/{self.num_kv_heads} heads",
            f"d {self.head_dim_qk}" + ("" if self.head_dim_qk == self.head_dim_vo else f"/{self.head_dim_vo}"),
            f"page {self.page_size}",
            self.dtype if self.kv_dtype == self.dtype else f"{self.dtype}, KV {self.kv_dtype}",
            f"{self.num_layers} layers",
        ]
        if self.sliding_window:
            parts.append(f"window {self.sliding_window}")
        if self.logits_soft_cap:
            parts.append(f"soft cap {self.logits_soft_cap:g}")
        if self.has_sinks:
            parts.append("sinks")
        if self.q_stride:
            parts.append("Q strided")
        return ", ".join(parts)


def _positive_int(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:  # int64 in every kernel
        raise SpecError(f"{field}={shown(value)}: must be a whole number above 0")


def _positive_float(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise SpecError(f"{field}={shown(value)}: must be a finite number above 0")
    return float(value)


def _one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SpecError(f"{field}={shown(value)}: must be one of {', '.join(dict.fromkeys(allowed))}")

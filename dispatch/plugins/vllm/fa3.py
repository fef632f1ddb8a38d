"""FlashAttention-3 as vLLM ships it: what its FLASH_ATTN runs on SM90."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dispatch.backends.base import unaligned_strides
from dispatch.backends.fa3 import Fa3
from dispatch.backends.fa3_impl import Kernel
from dispatch.backends.fa3_layout import VLLM
from dispatch.plugins.vllm.refusals import SPLITS
from dispatch.spec import AttentionSpec

UNUSED = (
    *("k_new", "v_new", "q_v", "cu_seqlens_k", "cu_seqlens_k_new", "leftpad_k"),
    *("rotary_cos", "rotary_sin", "seqlens_rotary", "pack_gqa", "cp_tot_seqused_k"),
)
"""Arguments without a default."""


class VllmFa3(Fa3):
    """Without a tactic it splits as vLLM's full decode graphs do."""

    splits = SPLITS
    layout = VLLM
    family = "vllm_fa3"
    distribution = "vllm"
    library = ""  # no module of vLLM's is imported

    def absent(self) -> str:
        return "" if _extension() else "not installed: vLLM with its FlashAttention-3 for CUDA"

    def strides_refused(self, spec: AttentionSpec) -> str:
        return unaligned_strides(spec)

    def kernel(self, device: torch.device, batch_size: int) -> Kernel:
        # vLLM's own copy, which is loaded once in a process; a child process need not import vLLM
        torch.ops.load_library(str(_extension()))  # type: ignore[no-untyped-call]
        ops = torch.ops._vllm_fa3_C
        starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
        ones = torch.ones(batch_size, dtype=torch.int32, device=device)
        none = dict.fromkeys(UNUSED)

        def schedule(
            batch: int,
            max_q: int,
            max_k: int,
            heads: int,
            kv_heads: int,
            dim: int,
            lengths: torch.Tensor,
            *,
            qkv_dtype: torch.dtype,
            page_size: int,
            causal: bool,
            window_size: tuple[int, int],
            num_splits: int,
        ) -> torch.Tensor:
            rows = starts if batch == batch_size else torch.arange(batch + 1, dtype=torch.int32, device=device)
            metadata: torch.Tensor = ops.get_scheduler_metadata(
                *(batch, max_q, max_k, heads, kv_heads, dim, dim, qkv_dtype, lengths, rows, None, None, None, None),
                *(page_size, 0, causal, *window_size, False, num_splits, None, 0),
            )
            return metadata

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> None:
            descales = {name: given.get(name) for name in ("q_descale", "k_descale", "v_descale")}
            # Rows in another order: each starts where `row_starts` says, has one query, and its pages are in that row.
            row_starts = given.get("row_starts")
            in_order = None if row_starts is None else row_starts[:-1]
            ops.fwd(
                q=q.squeeze(1),
                k=k,
                v=v,
                out=given["out"].squeeze(1),
                cu_seqlens_q=starts if row_starts is None else row_starts,
                seqused_q=None if row_starts is None else ones,
                kv_batch_idx=in_order,
                seqused_k=given["seqused_k"],
                max_seqlen_q=1,
                max_seqlen_k=given["max_seqlen_k"],
                page_table=given["page_table"],
                softmax_scale=given["softmax_scale"],
                is_causal=given["is_causal"],
                window_size_left=given["window_size_left"],
                window_size_right=given["window_size_right"],
                softcap=0.0,
                is_rotary_interleaved=True,
                scheduler_metadata=given["scheduler_metadata"],
                num_splits=given["num_splits"],
                sm_margin=0,
                s_aux=given.get("sinks"),
                cp_world_size=1,
                cp_rank=0,
                **descales,
                **none,
            )

        return schedule, attend


def _extension() -> Path | None:
    """The library's file, found without importing vLLM."""
    package = find_spec("vllm")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for found in sorted(Path(folder).glob("vllm_flash_attn/_vllm_fa3_C*.so")):
            return found
    return None

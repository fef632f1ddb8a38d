"""Compiling the FlashInfer modules that the facts need, several at once: one after the other takes two minutes."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dispatch.errors import one_line

AT_ONCE = 4
BF16, FP8, INDEX = torch.bfloat16, torch.float8_e4m3fn, torch.int32
DIM = (128, 128)


def compile_modules(fa3_wrapper: bool) -> None:
    """Best effort: what is not compiled here is compiled at its first use."""
    try:
        specs = [spec for spec in _specs(fa3_wrapper) if not spec.is_aot]
    except Exception as error:
        print(f"no compiling ahead: {one_line(error)}", flush=True)
        return
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for spec, why in zip(specs, threads.map(_build, specs), strict=True):
            if why:
                print(f"compiling {spec.name}: {why}", flush=True)


def _specs(fa3_wrapper: bool) -> list[Any]:
    """As the wrappers ask for them in FlashInfer 0.7.4: no positions, no window, no cap, no 16-bit reduction."""
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    xqa = importlib.import_module("flashinfer.jit.xqa").gen_xqa_module
    plain = (0, False, False)
    specs = [
        modules._gen_batch_prefill_primary_module("fa2", BF16, kv, BF16, INDEX, *DIM, *plain, False, False)
        for kv in (BF16, FP8)
    ]
    specs += [modules.gen_batch_decode_module(BF16, BF16, BF16, INDEX, *DIM, *plain)]
    specs += [
        xqa(BF16, kv, page, 128, group, False, BF16, 1)
        for kv, page, group in ((BF16, 16, 4), (BF16, 16, 8), (FP8, 64, 4))
    ]
    if fa3_wrapper:
        specs.append(modules.gen_batch_prefill_module("fa3", BF16, BF16, BF16, INDEX, *DIM, *plain, False, False))
    return specs


def _build(spec: Any) -> str:
    try:
        spec.build(need_lock=True)
    except Exception as error:
        return one_line(error)
    return ""

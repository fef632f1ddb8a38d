"""Real vLLM in this process, with the backend that is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from smoke.vllm.forced import force

PLUGIN, FORCED, OFF, ABSENT = DEFAULTS = ("plugin", "forced", "off", "absent")
BACKENDS = (PLUGIN, "FLASH_ATTN", "FLASHINFER")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def surroundings(backend: str) -> None:
    """Set what vLLM reads from the environment: before it is imported."""
    os.environ["ENABLE_DYNAMIC_DECODE_BACKEND"] = "1" if backend in (PLUGIN, FORCED) else "0"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if backend == "FLASHINFER":
        os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"  # or it would not take XQA without a network
    if backend == ABSENT:
        os.environ["VLLM_PLUGINS"] = ""
    if backend == FORCED:
        os.environ["DYN_DECODE_CAPTURE_MIB"] = "100000"  # other engines that start meanwhile are counted in


def engine(
    folder: Path, backend: str, kv_gib: float, max_len: int, fp8: bool = False, compiled: bool = False, **given: Any
) -> tuple[Any, float]:
    """An LLM, and the seconds that it took. `backend`: vLLM's name of one, or its default with our switch on ("plugin",
    and "forced": with other kernels than timing may choose), off ("off"), or without our package ("absent").

    `compiled`: by torch.compile, and with piecewise graphs too, as vLLM does unless it is told otherwise; over an fp8
    cache with the quantisation of Q as a kernel of its own, or our package would leave attention alone.
    """
    surroundings(backend)
    if backend == FORCED:
        force()
    from vllm import LLM

    start = monotonic()
    attention = {} if backend in DEFAULTS else {"attention_config": {"backend": backend}}
    compilation: dict[str, Any] = {} if compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if compiled and fp8:
        compilation["custom_ops"] = ["+quant_fp8"]
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max_len,
        max_num_seqs=SIZES[-1],
        gpu_memory_utilization=0.2,  # what vLLM wants to find free: several engines share the GPU
        kv_cache_memory_bytes=int(kv_gib * (1 << 30)),
        kv_cache_dtype="fp8" if fp8 else "auto",
        compilation_config={"cudagraph_capture_sizes": list(SIZES), **compilation},
        **attention,
        **given,
    )
    return llm, monotonic() - start


def generate(llm: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[Any]:
    """So many tokens after each prompt, the most probable ones, with their log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)


def logprobs(outputs: Sequence[Any]) -> list[list[tuple[int, float]]]:
    """Of each request, the tokens and their log-probabilities."""
    return [
        [(token, its[token].logprob) for token, its in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)]
        for o in outputs
    ]

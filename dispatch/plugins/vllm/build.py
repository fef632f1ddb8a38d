"""The kernels that plans name, built and checked on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dispatch._core import BackendPlan
from dispatch.backends import Registry
from dispatch.candidate import Candidate
from dispatch.engine.choose import Choice
from dispatch.engine.ranks import Ranks
from dispatch.errors import MeasureError, one_line
from dispatch.plugins.vllm import log
from dispatch.plugins.vllm.backend import DynamicBuilder
from dispatch.plugins.vllm.check import difference
from dispatch.plugins.vllm.decode import Decoder, DecodeStep
from dispatch.request import TuneRequest
from dispatch.spec import AttentionSpec
from dispatch.workspace import Workspaces


def give_decoders(
    builders: Sequence[DynamicBuilder],
    specs: Sequence[AttentionSpec],
    choices: Sequence[Choice],
    request: TuneRequest,
    backends: Registry,
    device: torch.device,
    ranks: Ranks,
    layers: Mapping[str, Any],
) -> None:
    """Give each builder its decoder, with what its plan names, where it is built and right on all ranks."""
    scratch, wanted = Workspaces(device), []
    for i, choice in enumerate(choices):
        boxes = [] if choice.plan is None else [decided.box for decided in choice.plan.boxes]
        named = {(box.bucket, Candidate.parse(box.candidate)) for box in boxes}
        wanted += [(i, *each) for each in sorted(named, key=str) if each[1] != choice.default]
    for i, bucket, candidate in wanted:
        backend = backends.get(candidate.backend)
        longest = candidate.max_kv or request.max_seq_len
        scratch.reserve(backend.family, backend.workspace_bytes(specs[i], bucket, longest))
    built: dict[tuple[int, int, str], DecodeStep] = {}
    failed = []
    for i, bucket, candidate in wanted:
        try:
            backend, longest = backends.get(candidate.backend), candidate.max_kv or request.max_seq_len
            impl = backend.build(specs[i], bucket, longest, scratch.get(backend.family), candidate.knobs)
            step = DecodeStep(impl, specs[i], bucket)
            if wrong := difference(step, layers[builders[i].layer_names[0]], longest):
                raise MeasureError(wrong)
            built[i, bucket, str(candidate)] = step
        except Exception as error:  # it loses its bucket, on all ranks
            log.warning("decode-dispatch: bucket %d: %s is not used: %s", bucket, candidate, one_line(error))
            failed.append([i, bucket, str(candidate)])
    for gone in (tuple(each) for rank in ranks.share("what is built", failed) for each in rank):
        built.pop(gone, None)
    for i, (builder, spec, choice) in enumerate(zip(builders, specs, choices, strict=True)):
        steps = {(bucket, Candidate.parse(name)): step for (j, bucket, name), step in built.items() if j == i}
        scaled = [layers[name] for name in builder.layer_names] if spec.kv_dtype == "fp8_e4m3" else []
        table = choice.table or BackendPlan([1], [])
        builder.decoder = Decoder(table, choice.default, steps, ranks, scaled)

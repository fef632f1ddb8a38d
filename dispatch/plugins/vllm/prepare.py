"""Between vLLM's KV cache and its graphs: a plan for each layer group, and what it names, built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backends.utils import get_kv_cache_layout
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dispatch._core import BackendPlan
from dispatch.backends import Registry
from dispatch.backends.registry import BUILT_IN, importer
from dispatch.candidate import Candidate
from dispatch.device import current_device
from dispatch.engine import LayerGroup
from dispatch.engine.choose import Choice, choose
from dispatch.engine.ranks import ALONE, Ranks
from dispatch.engine.runner import APART_S
from dispatch.errors import MeasureError, one_line
from dispatch.obtain import SLACK_S
from dispatch.plugins.vllm import log
from dispatch.plugins.vllm.backend import DynamicBuilder
from dispatch.plugins.vllm.check import difference
from dispatch.plugins.vllm.decode import Decoder, DecodeStep
from dispatch.plugins.vllm.graphs import Served, decode_descs
from dispatch.plugins.vllm.layers import spec_of
from dispatch.plugins.vllm.refusals import refusal, settings
from dispatch.request import TuneRequest
from dispatch.spec import AttentionSpec
from dispatch.traits import EngineTraits
from dispatch.workspace import Workspaces

DEFAULT = "vllm_fa3"
OURS = {DEFAULT: "dispatch.plugins.vllm.fa3:VllmFa3"}
FLASHINFER = ("flashinfer_fa2_tc", "flashinfer_xqa", "flashinfer_fa2")
"""Of those that vLLM's FlashInfer has; its cuDNN has no prepared graph."""


def registry() -> Registry:
    """Candidates inside vLLM, its own default first."""
    filled = Registry()
    for name, target in {**OURS, **{name: BUILT_IN[name] for name in FLASHINFER}}.items():
        filled.register(name, importer(target))
    return filled


def prepare(runner: GPUModelRunner) -> Served | None:
    """Plan, and build what the plan names. None where the default serves all. Raises whatever goes wrong."""
    config, manager = runner.vllm_config, runner.cudagraph_manager
    if why := refusal(config):  # another engine of this process had our backend, and vLLM has remembered it
        log.warning("decode-dispatch leaves attention alone: %s", why)
        return None
    if not manager.cudagraph_mode.separate_routine() or not decode_descs(manager._capture_descs):
        log.warning("decode-dispatch leaves attention alone: no full graphs of decode steps alone are captured")
        return None
    builders = [
        builder
        for groups in runner.attn_groups
        for group in groups
        if type(builder := group.get_metadata_builder(0)) is DynamicBuilder  # a class of its own may change the rows
    ]
    if not builders:
        log.warning("decode-dispatch leaves attention alone: no layers of the kind that it knows")
        return None
    layers = config.compilation_config.static_forward_context
    with set_current_vllm_config(config):
        layout = get_kv_cache_layout()
    specs = [spec_of(layers, builder.layer_names, builder.block_size, layout) for builder in builders]
    starts = [sum(spec.num_layers for spec in specs[:i]) for i in range(len(specs))]
    groups = [
        LayerGroup(spec, tuple(range(start, start + spec.num_layers)), DEFAULT)
        for spec, start in zip(specs, starts, strict=True)
    ]
    buckets = tuple(sorted({desc.num_reqs for desc in decode_descs(manager._capture_descs)}))
    capacity = runner.kv_cache_config.num_blocks * min(spec.page_size for spec in specs)
    request = TuneRequest(
        specs[0],
        buckets,
        config.model_config.max_model_len,
        capacity,
        settings(config),
        traits=EngineTraits(finite_kv=not config.model_config.enable_sleep_mode),  # zeroed when it is allocated
    )
    ranks, backends = _ranks(request), registry()
    try:
        with torch.inference_mode(False), torch.no_grad():
            choices = choose(groups, request, current_device(), backends, "", ranks)
            if all(choice.plan is None for choice in choices):
                return None
            decoders = _decoders(builders, specs, choices, request, backends, runner.device, ranks, layers)
    except BaseException as error:
        ranks.give_up(error)
        raise
    return Served(choices, decoders, ranks, request.config)


def _decoders(
    builders: Sequence[DynamicBuilder],
    specs: Sequence[AttentionSpec],
    choices: Sequence[Choice],
    request: TuneRequest,
    backends: Registry,
    device: torch.device,
    ranks: Ranks,
    layers: Mapping[str, Any],
) -> list[Decoder]:
    """One for each builder, with what its plan names, where it is built and right on all ranks."""
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
    decoders = []
    for i, (builder, choice) in enumerate(zip(builders, choices, strict=True)):
        steps = {(bucket, Candidate.parse(name)): step for (j, bucket, name), step in built.items() if j == i}
        decoders.append(Decoder(choice.table or BackendPlan([1], []), choice.default, steps, ranks))
        builder.decoder = decoders[-1]
    return decoders


def _ranks(request: TuneRequest) -> Ranks:
    """The ranks that share this model's layers."""
    group = get_tp_group()
    if group.world_size == 1:
        return ALONE
    return Ranks(group.cpu_group, APART_S + 2 * (request.config.time_budget_s + SLACK_S))

"""Between vLLM's KV cache and its graphs: what vLLM will run, as the request for a plan."""

from __future__ import annotations

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backends.utils import get_kv_cache_layout
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dispatch.backends import Registry
from dispatch.backends.registry import BUILT_IN, importer
from dispatch.device import current_device
from dispatch.engine import LayerGroup
from dispatch.engine.choose import choose, patience_s
from dispatch.engine.ranks import ALONE, Ranks
from dispatch.plugins.vllm import leave_alone
from dispatch.plugins.vllm.backend import DynamicBuilder
from dispatch.plugins.vllm.build import give_decoders
from dispatch.plugins.vllm.finite import is_finite
from dispatch.plugins.vllm.graphs import Served, decode_descs
from dispatch.plugins.vllm.layers import spec_of
from dispatch.plugins.vllm.memory import GRAPH_MIB, free_mib, spare_mib
from dispatch.plugins.vllm.refusals import refusal, settings
from dispatch.request import TuneRequest
from dispatch.traits import EngineTraits

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
        leave_alone(why)
        return None
    if not manager.cudagraph_mode.separate_routine() or not decode_descs(manager._capture_descs):
        leave_alone("no full graphs of decode steps alone are captured")
        return None
    spare = spare_mib(runner)
    if spare is None:
        leave_alone("vLLM has not profiled how much memory it takes to run")
        return None
    builders = [
        builder
        for groups in runner.attn_groups
        for group in groups
        if type(builder := group.get_metadata_builder(0)) is DynamicBuilder  # a class of its own may change the rows
    ]
    if not builders:
        leave_alone("no layers of the kind that it knows")
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
        traits=EngineTraits(finite_kv=is_finite(config, runner.kv_cache_config)),
    )
    ranks, backends = _ranks(request), registry()
    try:
        with torch.inference_mode(False), torch.no_grad():
            choices = choose(groups, request, current_device(), backends, "", ranks)
            if all(choice.plan is None for choice in choices):
                return None
            free = free_mib()
            give_decoders(builders, specs, choices, request, backends, runner.device, ranks, layers)
            served = Served(choices, builders, ranks, request.config, free - free_mib(), spare)
            graphs_mib = GRAPH_MIB * sum(len(descs) for descs in manager._capture_descs.values())
            if why := ranks.agreed("kernels are built", served.over_memory(free, graphs_mib)):
                served.give_back()  # before vLLM captures its own graphs
                leave_alone(why)
                return None
    except BaseException as error:
        for builder in builders:  # what was built goes, before vLLM captures its own graphs
            builder.decoder = None
        ranks.give_up(error)
        raise
    return served


def _ranks(request: TuneRequest) -> Ranks:
    """The ranks that share this model's layers."""
    group = get_tp_group()
    if group.world_size == 1:
        return ALONE
    return Ranks(group.cpu_group, patience_s(request.config))

"""Between vLLM's model runner and its graphs: the builder, the hook, and a graph for each variant."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dispatch.candidate import Candidate
from dispatch.config import DispatchConfig
from dispatch.decision import Reason
from dispatch.engine.choose import Choice
from dispatch.engine.ranks import ALONE, Ranks
from dispatch.errors import RanksError
from dispatch.plan import DecidedBox
from dispatch.plugins.vllm import graphs, prepare, runner
from dispatch.plugins.vllm.backend import DynamicBuilder, DynamicImpl
from dispatch.plugins.vllm.graphs import Served, decode_descs
from dispatch.plugins.vllm.layers import spec_of
from dispatch.plugins.vllm.memory import PEAK
from dispatch.samples import Box
from tests.make import make_plan, make_samples
from tests.vllm.test_decode import DEFAULT, LAYERS, OTHER, decoder, layer, metadata

SDPA = "torch_sdpa"
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def descs(*buckets):
    """What vLLM captures: full graphs of decode steps, and piecewise ones of the rest."""
    full = [BatchExecutionDescriptor(CUDAGraphMode.FULL, b, b, uniform_token_count=1) for b in buckets]
    return {
        CUDAGraphMode.FULL: full,
        CUDAGraphMode.PIECEWISE: [BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, b, None) for b in buckets],
    }


def made_builder(its):
    with set_current_vllm_config(its):
        return DynamicBuilder(FULL, list(LAYERS), its, torch.device("cpu"))


@pytest.fixture
def builder(config):
    return made_builder(config())


def test_without_a_plan_the_metadata_is_vllms(builder):
    built = builder.build(0, metadata((5, 60), 4))
    assert not hasattr(built, "decode_dispatch")


def test_with_a_plan_a_decode_step_has_what_serves_it_and_a_prefill_has_not(builder):
    builder.decoder = decoder()
    assert builder.build(0, metadata((5, 60), 4)).decode_dispatch is builder.decoder.steps[4, OTHER]
    assert not hasattr(builder.build(0, metadata((5, 60), 4, prefill=True)), "decode_dispatch")
    assert builder.build_for_cudagraph_capture(metadata((5, 60), 4)).decode_dispatch is not None


@pytest.fixture
def schedules(monkeypatch):
    """Of each of vLLM's builds, whether it computes FA3's schedule."""
    computed, build = [], FlashAttentionMetadataBuilder.build
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder,
        "build",
        lambda self, *given: computed.append(not given[2]) or build(self, *given),
    )
    return computed


def test_fa3s_schedule_is_computed_only_where_fa3_serves_and_the_first_build_finds_the_window(schedules, builder):
    builder.decoder = decoder()
    assert builder.aot_sliding_window is None
    for lengths in ((5, 60), (5, 60), (100, 120)):  # the last ones are longer than the plan knows
        builder.build(0, metadata(lengths, 4))
    builder.build(0, metadata((5, 60), 4, prefill=True))
    builder.decoder.serves, builder.decoder.forced = False, OTHER  # while graphs are captured
    builder.build(0, metadata((5, 60), 4))
    assert schedules == [True, False, True, True, True]


QUANT_FP8 = {"kv_cache_dtype": "fp8", "compilation_config": {"custom_ops": ["+quant_fp8"]}}
"""An engine with an fp8 cache that may be ours."""


@pytest.fixture
def made(monkeypatch):
    """Makes the layers of a model, with this configuration."""
    from vllm.model_executor.layers.attention import Attention

    from dispatch.plugins.vllm import register

    monkeypatch.setenv("ENABLE_DYNAMIC_DECODE_BACKEND", "1")
    register()

    def make(its):
        with set_current_vllm_config(its, check_compile=True), set_default_torch_dtype(torch.bfloat16):
            return [
                Attention(32, 128, 0.1, num_kv_heads=8, cache_config=its.cache_config, prefix=f"model.layers.{i}.attn")
                for i in range(2)
            ]

    return make


@pytest.mark.parametrize("fp8", [False, True])
def test_vllms_own_layers_have_what_the_spec_is_made_of(made, config, fp8):
    its = config(**(QUANT_FP8 if fp8 else {}))
    for one in made(its):
        assert type(one.impl) is DynamicImpl
        assert one.impl.quantises is fp8
        assert one.query_quant is None
        pages = torch.zeros(20, 16, 8, 256, dtype=torch.uint8 if fp8 else torch.bfloat16)
        one.kv_cache = (pages.view(torch.float8_e4m3fn) if fp8 else pages).transpose(1, 2)
    layers = its.compilation_config.static_forward_context
    spec = spec_of(layers, list(layers), 16, "NHD")
    assert (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, spec.num_layers) == (32, 8, 128, 2)
    assert (spec.dtype, spec.kv_dtype) == ("bf16", "fp8_e4m3" if fp8 else "bf16")
    assert spec.kv_strides == (16 * 8 * 256, 8 * 256, 256)
    assert spec.q_stride is None


def test_how_far_apart_queries_lie_is_seen_in_vllms_profiling_run(made, config):
    its = config()
    qkv = torch.zeros(6, (32 + 2 * 8) * 128, dtype=torch.bfloat16)
    for one in made(its):
        one.kv_cache = torch.zeros(20, 16, 8, 256, dtype=torch.bfloat16).transpose(1, 2)
        q, out = qkv[:, : 32 * 128].view(6, 32, 128), torch.zeros(6, 32, 128, dtype=torch.bfloat16)
        one.impl.forward(one, q, None, None, one.kv_cache, None, out)
    layers = its.compilation_config.static_forward_context
    assert spec_of(layers, list(layers), 16, "NHD").q_stride == 48 * 128
    for one in layers.values():
        one.impl.forward(one, q.contiguous(), None, None, one.kv_cache, None, out)
    assert spec_of(layers, list(layers), 16, "NHD").q_stride is None


def test_layers_that_do_not_quantise_q_are_another_model_for_vllms_compile_cache(made, config, caplog):
    """One that was compiled with the switch off would hand on a quantised Q."""
    for _ in range(2):  # for a second engine of the process, vLLM has remembered the backend
        its = config(**QUANT_FP8)
        its.compilation_config.enabled_custom_ops.update(["quant_fp8"])  # that of another layer, say
        part = its.with_hf_config(its.model_config.hf_config)  # as a model of several parts makes for each
        before = [each.compute_hash() for each in (its, part)]
        made(its)
        assert not set(before) & {its.compute_hash(), part.compute_hash()}
    assert "has no effect" not in caplog.text
    its = config()
    before = its.compute_hash()
    made(its)
    assert its.compute_hash() == before


def test_the_layers_of_a_second_engine_that_is_refused_quantise_as_vllms_do(made, config):
    made(config(**QUANT_FP8))
    for one in made(config(kv_cache_dtype="fp8")):  # vLLM has remembered the backend
        assert type(one.impl) is DynamicImpl
        assert not one.impl.quantises
        assert one.impl.supports_quant_query_input
        assert one.query_quant is not None


def test_a_layer_attends_with_what_its_metadata_names(builder, monkeypatch):
    fallen_back = []
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda self, *args: fallen_back.append(args[0]))
    impl = DynamicImpl.__new__(DynamicImpl)
    impl.quantises = False
    builder.decoder = decoder()
    its = layer()
    its.layer_name = LAYERS[0]
    q, out = torch.randn(4, 8, 64).to(torch.bfloat16), torch.full((4, 8, 64), float("nan"), dtype=torch.bfloat16)
    impl.forward(its, q, None, None, its.kv_cache, builder.build(0, metadata((5, 60), 4)), out)
    assert out.isfinite().all()
    assert not fallen_back
    impl.forward(its, q, None, None, its.kv_cache, builder.build(0, metadata((100, 120), 4)), out)
    impl.forward(its, q, None, None, its.kv_cache, None, out)  # vLLM's profiling run
    assert fallen_back == [its, its]


class Manager:
    """As vLLM's, whose graphs are the names of what they were captured with."""

    def __init__(self, decoders, *buckets):
        self.graphs, self._capture_descs, self.decoders = {}, descs(*buckets), decoders
        self.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE

    def capture(self):
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            self.graphs[desc] = tuple(decoder.forced for decoder in self.decoders)

    def run_fullgraph(self, desc):
        return self.graphs[desc]


@pytest.fixture
def captured(monkeypatch):
    """Served after capture, and its manager: torch_sdpa in a box of buckets 4 and 8, of 3."""
    monkeypatch.setattr(graphs, "free_mib", lambda: 10_000.0)

    def made(config=None, buckets=(2, 4, 8), built=(4, 8)):
        plan = make_plan(
            make_samples(buckets=buckets),
            boxes=tuple(DecidedBox(Box(b, 1, 64, 1000, 4000, SDPA), Reason.FASTEST, 1.1) for b in (4, 8)),
        )
        serving = decoder()
        serving.serves = False
        serving.steps |= {(8, OTHER): serving.steps[4, OTHER]} if 8 in built else {}
        builders = [SimpleNamespace(decoder=serving)]
        served = Served([Choice(DEFAULT, plan, plan.table())], builders, ALONE, config or DispatchConfig())
        manager = Manager([serving], *buckets)
        its = SimpleNamespace(cudagraph_manager=manager)
        manager.capture()
        served.capture(its, lambda its: its.cudagraph_manager.capture())
        return served, manager

    return made


def test_a_bucket_has_a_graph_for_each_variant_that_its_plan_names(captured):
    served, manager = captured()
    full = descs(2, 4, 8)[CUDAGraphMode.FULL]
    assert manager.graphs == dict.fromkeys(full, (None,))
    assert served.graphs == {(OTHER,): dict.fromkeys(full[1:], (OTHER,))}
    assert manager._capture_descs == descs(2, 4, 8)
    assert served.decoders[0].serves


def test_what_was_not_built_gets_no_graph(captured):
    served, _ = captured(built=(4,))
    assert served.graphs == {(OTHER,): {descs(2, 4, 8)[CUDAGraphMode.FULL][1]: (OTHER,)}}


@pytest.fixture
def four(captured):
    """Served at 4 and 8, with four kernels' names in plans for means in a ratio of 2, 4, 3 and 2.7: of all at 4, of the
    last one at 8."""
    served, _ = captured()
    (decoder,) = served.decoders
    names = [f"{SDPA}[max_kv={kv}]" for kv in (64, 128, 256, 512)]
    boxes = tuple(
        DecidedBox(Box(bucket, *mean, 1000, 4000, name), Reason.FASTEST, 1.1)
        for bucket in (4, 8)
        for mean, name in zip([(1, 1), (2, 7), (8, 23), (24, 64)], names, strict=True)
        if bucket == 4 or name == names[3]
    )
    served.choices = [Choice(DEFAULT, make_plan(make_samples(buckets=(4, 8)), boxes=boxes))]
    candidates = [Candidate.parse(name) for name in names]
    decoder.steps = {(bucket, c): decoder.steps[4, OTHER] for bucket in (4, 8) for c in candidates}
    return served, candidates


def test_of_more_kernels_than_a_batch_size_gets_graphs_those_for_the_widest_ranges_have_them(four, caplog):
    served, candidates = four
    with caplog.at_level(logging.INFO, "vllm.decode_dispatch"):
        wanted = served._variants(descs(4)[CUDAGraphMode.FULL])
    assert wanted == {(candidate,): {4} for candidate in candidates[1:]}
    assert f"{candidates[0]} at 4 keeps the default: 3 others of the bucket gain more" in caplog.text
    del served.decoders[0].steps[4, candidates[1]]  # it could not be built
    assert len(served._variants(descs(4)[CUDAGraphMode.FULL])) == 3


def test_what_comes_first_for_a_batch_size_is_captured_first_the_largest_before_the_others(four):
    served, (_, b, c, d) = four
    assert list(served._variants(descs(4, 8)[CUDAGraphMode.FULL]).items()) == [((d,), {4, 8}), ((b,), {4}), ((c,), {4})]


def test_a_replay_takes_the_graph_that_the_metadata_was_built_for(captured):
    served, manager = captured()
    two, four, _ = descs(2, 4, 8)[CUDAGraphMode.FULL]
    serving = served.decoders[0]
    serving.step(0, metadata((5, 60), 4))
    assert manager.run_fullgraph(four) == (OTHER,)
    serving.step(0, metadata((100, 120), 4))
    assert manager.run_fullgraph(four) == (None,)
    serving.chosen = OTHER  # a bucket without such a graph
    assert manager.run_fullgraph(two) == (None,)
    assert manager.graphs == dict.fromkeys(descs(2, 4, 8)[CUDAGraphMode.FULL], (None,))


def test_what_has_no_graph_is_not_chosen(captured, monkeypatch):
    """Or it would be planned for nothing."""
    served, manager = captured()
    serving = served.decoders[0]
    assert sorted(bucket for bucket, _ in serving.steps) == [4, 8]
    serving.serves = False
    looked = iter(["", "the budget is over"])  # of the variant at 4, and of another one at 8
    monkeypatch.setattr(served, "_over_time", lambda seconds: next(looked))
    monkeypatch.setattr(served, "_variants", lambda planned: {(OTHER,): {4}, (DEFAULT,): {8}})
    served.graphs.clear()
    served.capture(SimpleNamespace(cudagraph_manager=manager), lambda its: its.cudagraph_manager.capture())
    assert list(serving.steps) == [(4, OTHER)]
    assert serving.step(0, metadata((5, 60, 7, 8, 9, 10, 11, 12), 8)) is None
    assert serving.step(0, metadata((5, 60), 4)) is not None


@pytest.fixture
def two_groups(captured, config):
    """Builders and their manager, and Served after capture: both layer groups choose torch_sdpa at 4, or neither."""
    builders = [made_builder(config()) for _ in range(2)]
    for one in builders:
        one.decoder = decoder()
        one.build(0, metadata((5, 60), 4))
    both = Served(captured()[0].choices * 2, builders, ALONE, DispatchConfig())
    manager = Manager(both.decoders, 4)
    manager.capture()
    both.capture(SimpleNamespace(cudagraph_manager=manager), lambda its: its.cudagraph_manager.capture())
    return builders, manager, both


def test_of_several_layer_groups_each_leaves_out_the_schedule_that_no_graph_reads(two_groups, schedules):
    builders, manager, _ = two_groups
    four = descs(4)[CUDAGraphMode.FULL][0]
    for one in builders:
        one.build(0, metadata((5, 60), 4))
    assert manager.run_fullgraph(four) == (OTHER, OTHER)
    assert schedules == [False, False]


def test_where_no_graph_has_what_the_groups_chose_the_schedule_is_computed_for_the_defaults(two_groups, schedules):
    (one, other), manager, both = two_groups
    four = descs(4)[CUDAGraphMode.FULL][0]
    other.decoder.steps.clear()  # it could not plan, say
    assert set(both.graphs) == {(OTHER, OTHER)}
    for each in (one, other):
        each.build(0, metadata((5, 60), 4))
    assert schedules == [False, True]
    assert manager.run_fullgraph(four) == (None, None)
    assert schedules == [False, True, True]
    one.build(0, metadata((100, 120), 4))
    assert manager.run_fullgraph(four) == (None, None)
    assert schedules == [False, True, True, True]


def test_a_capture_that_fails_leaves_vllms_graphs(captured, caplog):
    served, manager = captured()
    own = dict(manager.graphs)
    served.graphs.clear()

    def fails(its):
        raise RuntimeError("out of memory")

    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        served.capture(SimpleNamespace(cudagraph_manager=manager), fails)
    assert "torch_sdpa and what follows keep the default: RuntimeError: out of memory" in caplog.text
    assert manager.graphs == own
    assert served.graphs == {}
    assert manager._capture_descs == descs(2, 4, 8)


def test_beyond_its_time_nothing_more_is_captured(captured, caplog):
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        served, _ = captured(DispatchConfig(capture_budget_s=1e-9))
    assert served.graphs == {}
    assert "torch_sdpa and what follows keep the default: the 1e-09 s for graphs are over" in caplog.text


def test_decode_steps_are_what_has_one_token_of_each_request():
    drafts = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 4, uniform_token_count=2)
    mixed = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8)
    planned = {CUDAGraphMode.FULL: [drafts, mixed, *descs(4)[CUDAGraphMode.FULL]]}
    assert decode_descs(planned) == descs(4)[CUDAGraphMode.FULL]
    assert decode_descs({}) == []


# --- the hook


@pytest.fixture
def vllms_own(monkeypatch):
    """vLLM's capture_model and profile_run, in whose place the hook comes; the former says that it was called."""
    calls = []
    monkeypatch.setattr(GPUModelRunner, "capture_model", lambda self: calls.append(self) or 7)
    monkeypatch.setattr(GPUModelRunner, "profile_run", lambda self: None)
    runner.hook()
    runner.hook()
    return calls


def test_vllm_captures_once_and_whatever_goes_wrong_in_planning(vllms_own, caplog):
    its = object()  # nothing that can be planned for
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert GPUModelRunner.capture_model(its) == 7
    assert vllms_own == [its]
    assert "decode-dispatch leaves attention alone" in caplog.text


def model_runner(builder, config, mode=CUDAGraphMode.FULL_AND_PIECEWISE, layers=None):
    """As vLLM's is before it captures, on a CPU."""
    layers = layers or {name: layer() for name in LAYERS}
    manager = Manager([], 4)
    manager.cudagraph_mode = mode
    config.compilation_config.static_forward_context = layers
    group = SimpleNamespace(get_metadata_builder=lambda ubatch: builder)
    return SimpleNamespace(
        vllm_config=config,
        cudagraph_manager=manager,
        attn_groups=[[group]],
        kv_cache_config=SimpleNamespace(num_blocks=40, kv_cache_groups=[SimpleNamespace(kv_cache_spec=FULL)]),
        device=torch.device("cpu"),
        **{PEAK: 3000.0},
    )


@pytest.fixture
def planned(monkeypatch):
    """choose(), told what it is asked, and with torch_sdpa in the plan of bucket 4 beside torch_chunked."""
    asked = []

    def choose(groups, request, device, backends, refusal, ranks):
        asked.append((groups, request, backends))
        plan = make_plan(
            make_samples(buckets=(4,)), boxes=(DecidedBox(Box(4, 1, 64, 1000, 4000, SDPA), Reason.FASTEST, 1.1),)
        )
        return [Choice(Candidate("torch_chunked"), plan, plan.table())]

    free = count(10_000, -100)
    for module in (prepare, graphs):
        monkeypatch.setattr(module, "free_mib", lambda: float(next(free)))
    monkeypatch.setattr(prepare, "choose", choose)
    monkeypatch.setattr(prepare, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setitem(prepare.OURS, SDPA, "dispatch.backends.torch_sdpa:TorchSdpa")
    return asked


def test_a_plan_is_asked_for_what_vllm_will_run_and_its_kernels_are_built(builder, config, planned):
    its = model_runner(builder, config(additional_config={"dynamic_decode": {"threshold": 0.05}}))
    served = prepare.prepare(its)
    ((group,), request, backends) = planned[0]
    assert (group.spec.page_size, group.spec.num_layers, group.layers) == (16, 2, (0, 1))
    assert (request.buckets, request.max_seq_len, request.capacity) == ((4,), 4096, 640)
    assert request.config.threshold == 0.05
    assert request.traits.finite_kv
    assert backends.names()[0] == "vllm_fa3"
    assert list(builder.decoder.steps) == [(4, OTHER)]
    assert served.decoders == [builder.decoder]
    assert (served.built_mib, served.spare_mib) == (100, 3512)


def test_over_an_fp8_cache_its_kernels_know_the_layers_whose_scales_they_have(builder, config, planned):
    pages = torch.zeros(40, 2, 16, 128, dtype=torch.float8_e4m3fn)
    layers = {name: layer(pages, kv_cache_dtype="fp8") for name in LAYERS}
    prepare.prepare(model_runner(builder, config(**QUANT_FP8), layers=layers))
    assert builder.decoder.layers == list(layers.values())
    prepare.prepare(model_runner(builder, config()))
    assert builder.decoder.layers == []


def test_a_cache_of_several_dtypes_is_not_declared_finite(builder, config, planned):
    its = model_runner(builder, config())
    quantised = replace(FULL, dtype=torch.float8_e4m3fn)
    its.kv_cache_config.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=quantised))
    prepare.prepare(its)
    assert not planned[0][1].traits.finite_kv


def test_what_cannot_be_built_loses_its_bucket_alone(builder, config, planned, monkeypatch, caplog):
    from dispatch.backends.torch_sdpa import TorchSdpa

    def fails(self, *args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(TorchSdpa, "build", fails)
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert prepare.prepare(model_runner(builder, config())).decoders[0].steps == {}
    assert "bucket 4: torch_sdpa is not used: RuntimeError: no such kernel" in caplog.text


def test_what_gives_other_numbers_over_vllms_cache_loses_its_bucket_alone(
    builder, config, planned, monkeypatch, caplog
):
    from dispatch.backends.torch_sdpa import TorchSdpa

    build = TorchSdpa.build
    monkeypatch.setattr(TorchSdpa, "build", lambda self, spec, *rest: build(self, replace(spec, sm_scale=0.5), *rest))
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert prepare.prepare(model_runner(builder, config())).decoders[0].steps == {}
    assert "bucket 4: torch_sdpa is not used: MeasureError: row" in caplog.text


def test_kernels_that_leave_vllm_too_little_are_given_back_before_it_captures(builder, config, planned, caplog):
    its = model_runner(builder, config())
    setattr(its, PEAK, 9_250.0)  # and 512, and 24 for each of two graphs
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert prepare.prepare(its) is None
    assert builder.decoder is None
    assert "9800 MiB are free, and vLLM needs 9810" in caplog.text


def test_kernels_go_before_vllm_captures_where_the_ranks_part(builder, config, planned, monkeypatch):
    def agreed(self, at, objection):
        if at == "kernels are built":
            assert builder.decoder is not None
            raise RanksError("rank 1 is gone")
        return ""

    monkeypatch.setattr(Ranks, "agreed", agreed)
    with pytest.raises(RanksError):
        prepare.prepare(model_runner(builder, config()))
    assert builder.decoder is None


def test_where_vllm_did_not_profile_its_memory_it_is_left_alone(builder, config, planned, caplog):
    its = model_runner(builder, config())
    delattr(its, PEAK)
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert prepare.prepare(its) is None
    assert not planned
    assert "has not profiled" in caplog.text


def test_a_builder_of_another_kind_is_left_alone(builder, config, planned, caplog):
    class TheirBuilder(DynamicBuilder):
        """As vLLM's for layers with static sinks, which changes lengths and block tables."""

    builder.__class__ = TheirBuilder
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert prepare.prepare(model_runner(builder, config())) is None
    assert not planned


def test_a_second_engine_of_the_process_that_names_a_backend_is_left_alone(builder, config, planned, caplog):
    named = config(attention_config={"backend": "FLASH_ATTN"})
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert prepare.prepare(model_runner(builder, named)) is None
    assert "named the attention backend" in caplog.text


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_graphs_that_mix_prefill_and_decode_are_left_alone(builder, config, planned, mode):
    assert prepare.prepare(model_runner(builder, config(), mode)) is None
    assert not planned
    assert builder.decoder is None


def test_on_a_machine_without_the_kernels_vllm_goes_on(builder, config, monkeypatch, vllms_own, caplog):
    monkeypatch.setattr(prepare, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    its = model_runner(builder, config())
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        GPUModelRunner.capture_model(its)
    assert vllms_own == [its]
    assert "needs a CUDA device" in caplog.text
    assert builder.decoder is None

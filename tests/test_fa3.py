"""FA3 on a machine without a GPU: what is eligible, what is refused and why, and that its two calls agree."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dispatch.backends import fa3
from dispatch.backends.fa3 import Fa3, most_splits
from dispatch.step import StepInputs
from tests.eligibility import GROUPS, H200, PAGES, PAIRS, layer
from tests.fakes import CPU


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: object())


def reason(spec, device=H200):
    return Fa3().support(spec, device).reason


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_head_dim_group_and_page_is_served_in_16_bits_and_over_fp8_from_bf16(dim, pair):
    for group, page, window in product(GROUPS, PAGES, (None, 1, 128)):
        spec = layer(group, dim, page, dtype=pair[0], kv_dtype=pair[1], sliding_window=window)
        assert Fa3().support(spec, H200).ok == (pair in PAIRS[:3])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "fp32", "kv_dtype": "fp32"}, "dtype fp32: bf16 or fp16"),
        ({"dtype": "fp16", "kv_dtype": "fp8_e4m3"}, "dtype fp16 with KV fp8_e4m3: the output is bf16"),
        ({"head_dim_vo": 64}, "head dim 128 of K and 64 of V: must be equal"),
        ({"dim": 264}, "head dim 264: a multiple of 8, up to 256"),
        ({"dim": 72, "kv_dtype": "fp8_e4m3"}, "head dim 72: a multiple of 16, up to 256"),
        ({"logits_soft_cap": 30.0}, "soft cap: tokenspeed-fa3 is built without it"),
        ({"has_sinks": True, "kv_dtype": "fp8_e4m3"}, "sinks: taken in bf16"),
        ({"has_sinks": True, "dtype": "fp16", "kv_dtype": "fp16"}, "sinks: taken in bf16"),
        ({"kv_strides": (8192, 256, 128)}, "KV strides: only a contiguous cache"),
    ],
)
def test_what_the_kernel_lacks_is_refused_with_its_reason(changes, why):
    assert reason(layer(**changes)).startswith(why)


def test_sinks_are_served_in_bf16_and_both_layouts_are():
    assert Fa3().support(layer(has_sinks=True), H200).ok
    assert Fa3().support(layer(kv_layout="HND"), H200).ok


def test_the_device_is_looked_at_before_the_library_and_the_library_before_the_shape(monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: None)
    capped = layer(logits_soft_cap=30.0)
    assert reason(capped, CPU) == "needs a CUDA device"
    assert reason(capped, replace(H200, capability=(8, 0))) == "needs SM90, this is SM80"
    assert reason(capped, replace(H200, capability=(10, 0))) == "needs SM90, this is SM100"
    assert reason(capped) == "not installed: pip install tokenspeed-fa3"


def test_the_parts_of_a_row_fill_the_card_within_what_the_row_and_the_kernel_hold():
    assert most_splits(layer(), 132, 65536) == 132 // 2
    assert most_splits(layer(num_qo_heads=8, num_kv_heads=1), 132, 65536) == 128  # the heuristic's end
    assert most_splits(layer(), 132, 1000) == 8  # tiles of 128 tokens
    assert most_splits(layer(num_qo_heads=256, num_kv_heads=256), 132, 65536) == 1


@pytest.mark.parametrize(("batch", "tactics"), [(1, 8), (8, 8), (9, None), (65, None), (66, 1), (256, 1)])
def test_fewer_parts_are_tried_where_they_may_be_cheaper(batch, tactics):
    # two KV heads: 16 of them at batch 8, and one for each of 132 SMs at batch 66
    expected = ("",) if tactics is None else ("", f"num_splits={tactics}")
    assert Fa3().tactics(layer(sliding_window=128), H200, batch, 65536) == expected


class Library:
    """Records what is called; the schedule is the lengths at the time."""

    def __init__(self, monkeypatch):
        self.schedules, self.forwards = [], []
        module = SimpleNamespace(get_scheduler_metadata=self.schedule)
        monkeypatch.setattr(fa3.importlib, "import_module", lambda name: module)
        monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=self.forward), raising=False)
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def schedule(self, *args, **kwargs):
        self.schedules.append((args, kwargs))
        return args[6].clone()

    def forward(self, *args, **kwargs):
        self.forwards.append((args, kwargs))
        kwargs["out"].fill_(1)

    def step(self, spec, tactic=None, sinks=None):
        impl = Fa3().build(spec, 3, 4096, torch.empty(0, dtype=torch.uint8), tactic or {})
        pages = torch.zeros(5, *((16, 2) if spec.kv_layout == "NHD" else (2, 16)), 128).to(
            torch.float8_e4m3fn if spec.kv_dtype == "fp8_e4m3" else torch.bfloat16
        )
        lengths = torch.tensor([1, 20, 300], dtype=torch.int32)
        inputs = StepInputs(3, lengths, lengths, torch.zeros(3, 256, dtype=torch.int32))
        q, out = torch.full((3, 8, 128), 1e4, dtype=torch.bfloat16), torch.zeros(3, 8, 128, dtype=torch.bfloat16)
        impl.begin_step(inputs)
        impl.forward(q, (pages, pages), out, sinks)
        return impl, inputs, out


@pytest.fixture
def library(monkeypatch):
    return Library(monkeypatch)


@pytest.mark.parametrize(("window", "left_right"), [(None, (-1, -1)), (128, (127, 0))])
@pytest.mark.parametrize("tactic", [{}, {"num_splits": 8}])
def test_the_schedule_and_the_kernel_are_told_the_same(library, window, left_right, tactic):
    library.step(layer(sliding_window=window), tactic)
    (args, scheduled), (_, launched) = library.schedules[0], library.forwards[0]
    assert args[:6] == (3, 1, 256 * 16, 8, 2, 128)
    assert launched["max_seqlen_k"] == 256 * 16
    assert launched["num_splits"] == scheduled["num_splits"] == tactic.get("num_splits", 32)  # 4096 / 128 tiles
    assert scheduled["window_size"] == (launched["window_size_left"], launched["window_size_right"]) == left_right
    assert scheduled["causal"] is launched["is_causal"] is True
    assert scheduled["page_size"] == 16


def test_the_schedule_is_renewed_at_its_place(library):
    impl, inputs, _ = library.step(layer())
    address = impl.metadata.data_ptr()
    inputs.lengths.add_(1)
    impl.begin_step(inputs)
    assert impl.metadata.data_ptr() == address
    assert impl.metadata.tolist() == [2, 21, 301]
    assert library.forwards[0][1]["scheduler_metadata"] is impl.metadata


def test_the_kernel_writes_to_out_itself(library):
    _, _, out = library.step(layer())
    assert library.forwards[0][1]["out"].data_ptr() == out.data_ptr()
    assert bool((out == 1).all())


def test_hnd_pages_are_handed_over_as_a_view(library):
    library.step(layer(kv_layout="HND"))
    k = library.forwards[0][0][1]
    assert k.shape == (5, 16, 2, 128)
    assert k.stride() == (16 * 2 * 128, 128, 16 * 128, 1)


def test_over_fp8_q_is_quantised_in_forward_and_saturates(library):
    library.step(layer(kv_dtype="fp8_e4m3", k_scale=0.25, v_scale=0.5))
    (args, launched), (_, scheduled) = library.forwards[0], library.schedules[0]
    assert args[0].dtype is scheduled["qkv_dtype"] is torch.float8_e4m3fn
    assert bool((args[0].float() == 448).all())
    scales = {name: launched[name] for name in ("q_descale", "k_descale", "v_descale")}
    assert {name: (t.shape, t.unique().item()) for name, t in scales.items()} == {
        "q_descale": ((3, 2), 1.0),
        "k_descale": ((3, 2), 0.25),
        "v_descale": ((3, 2), 0.5),
    }


def test_sinks_are_handed_over_as_bf16(library):
    library.step(layer(has_sinks=True), sinks=torch.ones(8))
    assert library.forwards[0][1]["sinks"].dtype is torch.bfloat16


def _wheel():
    """The folder of the installed interface; importing it needs a GPU build of torch, reading it does not."""
    found = find_spec("flash_attn_interface")
    if found is None or found.origin is None:
        pytest.skip("tokenspeed-fa3 is not installed")
    return Path(found.origin)


def test_the_installed_schedule_has_every_argument_that_we_name(library):
    tree = ast.parse(_wheel().read_text())
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "get_scheduler_metadata")
    names = [a.arg for a in function.args.args]
    library.step(layer())
    args, kwargs = library.schedules[0]
    assert names[: len(args)] == [
        *("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens")
    ]
    assert set(kwargs) <= set(names[len(args) :])


def test_the_installed_operator_has_every_argument_that_we_name(library):
    binary = next(_wheel().parent.glob("flash_attn_3/_C*.so")).read_bytes()
    start = binary.index(b"fwd(Tensor q,")
    schema = torch._C.parse_schema("flash_attn_3::" + binary[start : binary.index(b"\0", start)].decode())
    names = [argument.name for argument in schema.arguments]
    library.step(layer(kv_dtype="fp8_e4m3"))
    library.step(layer(has_sinks=True), sinks=torch.ones(8))
    assert names[:3] == ["q", "k", "v"]
    for args, kwargs in library.forwards:
        assert len(args) == 3
        assert set(kwargs) <= set(names)

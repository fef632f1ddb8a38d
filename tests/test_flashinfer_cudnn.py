"""The prepared cuDNN graph on a machine without a GPU: what is eligible, what is refused and why, what is called."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from dispatch.backends import flashinfer_cudnn
from dispatch.backends.flashinfer_cudnn import FlashInferCudnn
from dispatch.errors import MeasureError
from dispatch.step import StepInputs
from tests.eligibility import GROUPS, H200, PAGES, PAIRS, layer
from tests.fakes import CPU


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer_cudnn, "version", lambda name: "0.7.4")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


def reason(spec, device=H200):
    return FlashInferCudnn().support(spec, device).reason


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_head_dim_and_group_is_served_in_16_bits_with_pages_of_16_and_more(dim, pair):
    for group, page, extras in product(GROUPS, PAGES, ({}, {"sliding_window": 128}, {"kv_layout": "HND"})):
        spec = layer(group, dim, page, dtype=pair[0], kv_dtype=pair[1], **extras)
        assert FlashInferCudnn().support(spec, H200).ok == (page >= 16 and pair in PAIRS[:2])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "fp32", "kv_dtype": "fp32"}, "dtype fp32: bf16 or fp16"),
        ({"kv_dtype": "fp8_e4m3"}, "KV dtype fp8_e4m3: must be that of Q"),
        ({"page": 8}, "page size 8: 16, 32, 64 or 128"),
        ({"head_dim_vo": 64}, "head dim 128 of K and 64 of V: must be equal"),
        ({"dim": 264}, "head dim 264: at most 256 on SM90"),
        ({"logits_soft_cap": 30.0}, "soft cap: the graph has none"),
        ({"has_sinks": True}, "sinks: cuDNN takes none with a single query"),
        ({"kv_strides": (8192, 256, 128)}, "KV strides: only a contiguous cache"),
    ],
)
def test_what_the_graph_lacks_is_refused_with_its_reason(changes, why):
    assert reason(layer(**changes)).startswith(why)


def test_before_sm90_heads_are_smaller():
    a100 = replace(H200, capability=(8, 0))
    assert reason(layer(dim=128), a100) == ""
    assert reason(layer(dim=192), a100) == "head dim 192: at most 128 on SM80"


def test_the_device_is_looked_at_before_the_libraries(monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: None)
    assert reason(layer(page=8), CPU) == "needs a CUDA device"
    assert reason(layer(page=8), replace(H200, capability=(7, 5))) == "needs SM80, this is SM75"
    assert reason(layer(page=8)) == "not installed: pip install flashinfer-python"


@pytest.mark.parametrize("old", ["0.6.14", "0.7", "0.7.3", "0.6.14+cu130"])
def test_a_flashinfer_without_the_prepared_graph_is_refused(monkeypatch, old):
    monkeypatch.setattr(flashinfer_cudnn, "version", lambda name: old)
    assert reason(layer()) == f"FlashInfer {old} is not known to have the prepared cuDNN graph: 0.7.4 or later"


@pytest.mark.parametrize("new", ["0.7.4", "0.7.4.post1", "0.7.10", "0.8", "1.0rc1"])
def test_a_later_flashinfer_is_served(monkeypatch, new):
    monkeypatch.setattr(flashinfer_cudnn, "version", lambda name: new)
    assert reason(layer()) == ""


def test_a_missing_frontend_is_refused(monkeypatch):
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: None if name == "cudnn" else object())
    assert reason(layer()) == "not installed: pip install nvidia-cudnn-frontend"


@pytest.mark.parametrize("old", [None, 91001])
def test_an_old_or_absent_cudnn_is_refused(monkeypatch, old):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: old)
    assert reason(layer()) == f"cuDNN {old}: 91002 (9.10.2) or later"


def test_a_cudnn_that_torch_rejects_is_refused(monkeypatch):
    def mismatch():
        raise RuntimeError("cuDNN version incompatibility\nmore")

    monkeypatch.setattr(torch.backends.cudnn, "version", mismatch)
    assert reason(layer()) == "cuDNN cannot be used: cuDNN version incompatibility"


def test_narrower_tables_are_tried_for_few_kv_heads():
    backend = FlashInferCudnn()
    assert backend.tactics(layer(), H200, 2, 131072) == ("", "max_kv=4096", "max_kv=16384")
    assert backend.tactics(layer(), H200, 3, 131072) == ("",)


class Library:
    """Records what is prepared and what is run; a graph needs `workspace_bytes` of scratch."""

    def __init__(self, monkeypatch):
        self.prepared, self.runs, self.workspace_bytes = [], [], 64
        module = SimpleNamespace(prepare_cudnn_batch_decode=self.prepare)
        monkeypatch.setattr(flashinfer_cudnn, "importlib", SimpleNamespace(import_module=lambda name: module))

    def prepare(self, *args, **kwargs):
        self.prepared.append((args, kwargs))
        graph = SimpleNamespace(get_workspace_size=lambda: self.workspace_bytes)
        return SimpleNamespace(graph=graph, run=lambda *a, **k: self.runs.append((a, k)))

    def step(self, spec, max_kv=4096, layers=1):
        impl = FlashInferCudnn().build(spec, 3, max_kv, torch.zeros(64, dtype=torch.uint8), {})
        inner = (16, 2) if spec.kv_layout == "NHD" else (2, 16)
        lengths = torch.tensor([1, 20, 300], dtype=torch.int32)
        inputs = StepInputs(3, lengths, lengths, torch.zeros(3, 256, dtype=torch.int32))
        q, out = (torch.zeros(3, 8, 128, dtype=torch.bfloat16) for _ in range(2))
        impl.begin_step(inputs)
        for _ in range(layers):
            pages = torch.zeros(5, *inner, 128, dtype=torch.bfloat16)
            impl.forward(q, (pages, pages), out)
        return inputs, out


@pytest.fixture
def library(monkeypatch):
    return Library(monkeypatch)


def test_a_graph_is_prepared_once_for_all_layers(library):
    library.step(layer(), layers=3)
    assert (len(library.prepared), len(library.runs)) == (1, 3)


@pytest.mark.parametrize(("window", "left"), [(None, -1), (1, 0), (128, 127)])
def test_the_graph_is_told_the_window_without_the_current_token(library, window, left):
    library.step(layer(sliding_window=window))
    assert library.prepared[0][1]["window_left"] == left


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_graph_reads_pages_as_hnd_without_a_copy(library, layout):
    library.step(layer(kv_layout=layout))
    k = library.prepared[0][0][1]
    assert k.shape == (5, 2, 16, 128)
    assert k.stride() == ((4096, 128, 256, 1) if layout == "NHD" else (4096, 2048, 128, 1))


@pytest.mark.parametrize(("max_kv", "pages"), [(4096, 256), (1024, 64)])
def test_the_declared_maximum_is_the_width_of_the_table(library, max_kv, pages):
    library.step(layer(), max_kv)
    prepared = library.prepared[0][1]
    assert prepared["block_tables"].shape == (3, pages)
    assert prepared["max_sequence_kv"] == max_kv
    assert library.runs[0][1]["block_tables"] is prepared["block_tables"]


def test_the_graph_reads_the_lengths_and_writes_out_in_place(library):
    inputs, out = library.step(layer())
    (_, _, _, written, _, _), options = library.runs[0]
    assert written.data_ptr() == out.data_ptr()
    lengths = options["actual_seq_lens_kv"]
    assert (lengths.shape, lengths.data_ptr()) == ((3, 1, 1, 1), inputs.lengths.data_ptr())


def test_a_graph_that_needs_more_scratch_than_there_is_does_not_run(library):
    library.workspace_bytes = 65
    with pytest.raises(MeasureError, match="needs 65 bytes of scratch; 64 are there"):
        library.step(layer())
    assert library.runs == []

"""The sizes of a dense layer beside its attention, from a config.json."""

from __future__ import annotations

import json

import pytest

from dispatch.errors import ModelError
from dispatch.hf_dense import DenseSizes, read_dense
from dispatch.models import load_fields

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 8192,
}


def read(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({name: value for name, value in (LLAMA | changes).items() if value is not None}))
    return read_dense(load_fields(str(path))[1])


# Published values: hidden size, size of the MLP.
@pytest.mark.parametrize(
    ("name", "hidden", "middle"),
    [
        ("qwen3-8b", 4096, 12288),
        ("qwen3-32b", 5120, 25600),
        ("llama-3.1-8b", 4096, 14336),
        ("llama-3.1-70b", 8192, 28672),
        ("mistral-7b", 4096, 14336),
        ("gemma-2-9b", 3584, 14336),
    ],
)
def test_a_preset_has_the_published_sizes(name, hidden, middle):
    assert read_dense(load_fields(name)[1]) == DenseSizes(hidden, middle)


def test_a_rank_has_its_share_of_the_mlp_and_the_whole_hidden_state():
    assert DenseSizes(4096, 12288).split(4) == DenseSizes(4096, 3072)


def test_an_mlp_that_does_not_divide_is_refused():
    with pytest.raises(ModelError, match=r"^intermediate_size=12288 cannot be split over tp=5 ranks$"):
        DenseSizes(4096, 12288).split(5)


@pytest.mark.parametrize(
    "field", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size"]
)
def test_a_mixture_of_experts_is_refused_by_name(tmp_path, field):
    with pytest.raises(ModelError, match=f"{field}=8: not served: a mixture of experts; this is for dense models"):
        read(tmp_path, **{field: 8})


def test_experts_that_are_none_are_no_mixture(tmp_path):
    assert read(tmp_path, num_experts=0) == DenseSizes(4096, 11008)


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size"])
def test_a_missing_size_is_named(tmp_path, field):
    with pytest.raises(ModelError, match=f"missing {field}$"):
        read(tmp_path, **{field: None}, head_dim=128)


def test_a_list_of_sizes_is_refused(tmp_path):
    with pytest.raises(ModelError, match="intermediate_size="):
        read(tmp_path, intermediate_size=[11008, 5504])

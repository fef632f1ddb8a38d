"""What a model's weights weigh, from a config.json."""

from __future__ import annotations

import json

import pytest

from dispatch.errors import ModelError
from dispatch.hf_weights import weight_bytes
from dispatch.models import load_fields, load_model
from tests.make import TINY

# TINY's, in elements.
EMBEDDING, ATTENTION, MLP = 64_000, 12_288, 24_576
MOE = {"num_experts": 8, "moe_intermediate_size": 32}
EXPERT, ROUTER = 6_144, 512  # 64 x 32 x 3, 64 x 8


def bytes_of(model, tp=1):
    return weight_bytes(load_fields(model)[1], load_model(model).layer_groups(tp, 16), tp)


@pytest.fixture
def write(tmp_path):
    """A config.json with these fields; without those that are None."""

    def write(config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
        return str(path)

    return write


@pytest.fixture
def elements(write):
    """Weights of a rank of TINY with these fields changed, in elements of bf16."""
    return lambda tp=1, **changes: bytes_of(write(TINY | changes), tp) / 2


# Published numbers of parameters, in billions.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.8),
        ("qwen3-30b-a3b", 30.5),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("mistral-7b", 7.25),
        ("gemma-2-9b", 9.24),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(name, billions):
    assert bytes_of(name) / 2 == pytest.approx(billions * 1e9, rel=0.01)


# Published configs and their numbers of parameters, in billions.
PUBLISHED = {
    "Llama-3.2-1B, tied": (1.236, "llama", (2048, 8192, 16, 32, 8, 64, 128256), {"tie_word_embeddings": True}),
    "starcoder2-7b, no gate": (7.17, "starcoder2", (4608, 18432, 32, 36, 4, 128, 49152), {}),
    "Mixtral-8x7B": (46.7, "mixtral", (4096, 14336, 32, 32, 8, 128, 32000), {"num_local_experts": 8}),
    "Qwen1.5-MoE-A2.7B": (
        14.3,
        "qwen2_moe",
        (2048, 5632, 24, 16, 16, 128, 151936),
        {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    "GLM-4.5-Air": (
        106,
        "glm4_moe",
        (4096, 10944, 46, 96, 8, 128, 151552),
        {"n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    ),
}


@pytest.mark.parametrize(("billions", "model_type", "sizes", "more"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_config_gives_the_published_number_of_parameters(write, billions, model_type, sizes, more):
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers")
    fields += ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = {
        "model_type": model_type,
        "max_position_embeddings": 4096,
        **dict(zip(fields, sizes, strict=True)),
        **more,
    }
    assert bytes_of(write(config)) / 2 == pytest.approx(billions * 1e9, rel=0.01)


def test_a_dense_model_is_two_embeddings_and_its_layers(elements):
    assert elements() == 2 * EMBEDDING + 3 * (ATTENTION + MLP)


@pytest.mark.parametrize(
    ("model_type", "said", "embeddings"),
    [("llama", None, 2), ("llama", True, 1), ("gemma2", None, 1), ("gemma2", False, 2), ("cohere2", None, 1)],
)
def test_tied_embeddings_count_once_as_the_config_or_its_class_says(elements, model_type, said, embeddings):
    found = elements(model_type=model_type, head_dim=16, tie_word_embeddings=said)
    assert found == embeddings * EMBEDDING + 3 * (ATTENTION + MLP)


def test_an_mlp_without_a_gate_has_two_products(elements):
    assert elements(model_type="starcoder2") == EMBEDDING + 3 * (ATTENTION + MLP * 2 / 3)


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_and_their_router_stand_in_place_of_the_mlp(elements, field):
    found = elements(**{field: 8}, moe_intermediate_size=32)
    assert found == 2 * EMBEDDING + 3 * (ATTENTION + 8 * EXPERT + ROUTER)


def test_experts_without_a_size_of_their_own_have_the_mlps(elements):
    assert elements(num_local_experts=8) == 2 * EMBEDDING + 3 * (ATTENTION + 8 * MLP + ROUTER)


@pytest.mark.parametrize(
    ("fields", "shared"),
    [
        ({"n_shared_experts": 2}, 2 * EXPERT),
        ({"num_shared_experts": 2}, 2 * EXPERT),
        ({"shared_expert_intermediate_size": 96}, 3 * EXPERT),
        ({"shared_intermediate_size": 96}, 3 * EXPERT),
        ({"n_shared_experts": 0}, 0),
    ],
)
def test_shared_experts_stand_beside_the_routed_ones(elements, fields, shared):
    assert elements(**MOE, **fields) == 2 * EMBEDDING + 3 * (ATTENTION + 8 * EXPERT + ROUTER + shared)


@pytest.mark.parametrize(
    ("fields", "dense"),
    [({"first_k_dense_replace": 2}, 2), ({"decoder_sparse_step": 2}, 2), ({"first_k_dense_replace": 9}, 3)],
)
def test_some_layers_of_a_mixture_are_dense(elements, fields, dense):
    sparse = (3 - dense) * (8 * EXPERT + ROUTER)
    assert elements(**MOE, **fields) == 2 * EMBEDDING + 3 * ATTENTION + dense * MLP + sparse


def test_a_rank_has_its_share_but_the_router_whole(elements):
    share = 2 * EMBEDDING + 3 * (ATTENTION + 8 * EXPERT)
    assert elements(tp=2, **MOE) == share / 2 + 3 * ROUTER


def test_a_rank_beyond_the_kv_heads_has_a_copy_of_one(elements):
    attention = 64 * (1 + 1) * (16 + 16)  # one query head and one KV head
    assert elements(tp=4) == (2 * EMBEDDING + 3 * MLP) / 4 + 3 * attention


def test_what_does_not_divide_over_the_ranks_is_padded(elements):
    embedding, mlp = 501 * 64, 64 * 65 * 3
    assert elements(tp=2, vocab_size=1001, intermediate_size=129) == 2 * embedding + 3 * (ATTENTION / 2 + mlp)


def test_float32_takes_twice_the_bytes(write):
    config = TINY | {"torch_dtype": "float32"}
    assert bytes_of(write(config)) == 4 * (2 * EMBEDDING + 3 * (ATTENTION + MLP))


def test_what_stands_beside_a_text_config_holds_for_it(write):
    inner = {name: value for name, value in TINY.items() if name != "torch_dtype"}
    beside = {"model_type": "mistral3", "torch_dtype": "bfloat16", "text_config": inner}
    assert bytes_of(write(beside | {"tie_word_embeddings": True})) == 2 * (EMBEDDING + 3 * (ATTENTION + MLP))
    with pytest.raises(ModelError, match="quantization_config="):
        bytes_of(write(beside | {"quantization_config": {"quant_method": "fp8"}}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": None}, "missing vocab_size$"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"intermediate_size": None}, "missing intermediate_size$"),
        ({"hidden_size": None, "head_dim": 16}, "missing hidden_size$"),
        ({"num_experts": 8, "intermediate_size": None}, "missing intermediate_size$"),
        ({"moe_intermediate_size": 32}, "moe_intermediate_size=32: .* mixture of experts"),
        ({"moe_num_experts": 8}, "moe_num_experts=8: .* mixture of experts"),
        ({**MOE, "mlp_only_layers": [0]}, "mlp_only_layers=.* which layers have experts"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config=.* not stored in the activation"),
        ({"layer_types": ["linear_attention"] * 2 + ["full_attention"]}, "without softmax attention"),
    ],
)
def test_where_the_weights_cannot_be_known_the_reason_is_said(elements, fields, message):
    with pytest.raises(ModelError, match=message):
        elements(**fields)

"""From a config.json to attention layer groups."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dispatch.models
from dispatch.errors import ModelError
from dispatch.models import Model, load_model, preset_names
from dispatch.spec import AttentionSpec

PRESETS = Path(dispatch.models.__file__).with_name("presets")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
}
GONE = object()


def write(folder: Path, config: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def load(folder: Path, **changes: Any) -> Model:
    """LLAMA with these fields changed, or left out where GONE."""
    config = {name: value for name, value in (LLAMA | changes).items() if value is not GONE}
    return load_model(write(folder, config))


def windows(model: Model) -> list[int | None]:
    return [layer.sliding_window for layer in model.layers]


# Published values: query heads, KV heads, head size, layers, positions.
@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "head_dim", "layers", "positions"),
    [
        ("qwen3-8b", 32, 8, 128, 36, 40960),
        ("qwen3-32b", 64, 8, 128, 64, 40960),
        ("qwen3-30b-a3b", 32, 4, 128, 48, 40960),
        ("llama-3.1-8b", 32, 8, 128, 32, 131072),
        ("llama-3.1-70b", 64, 8, 128, 80, 131072),
        ("mistral-7b", 32, 8, 128, 32, 32768),
    ],
)
def test_a_preset_is_one_group_of_full_attention_as_published(
    name: str, heads: int, kv_heads: int, head_dim: int, layers: int, positions: int
) -> None:
    model = load_model(name)
    assert (model.name, model.dtype, model.max_position_embeddings) == (name, "bf16", positions)
    assert model.layer_groups(1, 16, None) == (
        AttentionSpec(
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim,
            page_size=16,
            num_layers=layers,
        ),
    )


def test_gemma_2_is_two_groups_and_the_sliding_one_comes_first() -> None:
    model = load_model("gemma-2-9b")
    sliding, full = model.layer_groups(2, 32, "fp8_e4m3")
    assert (sliding.sliding_window, full.sliding_window) == (4096, None)
    for group in (sliding, full):
        assert (group.num_qo_heads, group.num_kv_heads, group.num_layers) == (8, 4, 21)
        assert (group.head_dim_qk, group.head_dim_vo, group.page_size) == (256, 256, 32)
        assert (group.dtype, group.kv_dtype, group.logits_soft_cap) == ("bf16", "fp8_e4m3", 50.0)
        assert group.scale == 1 / 16  # query_pre_attn_scalar 256
    assert model.max_position_embeddings == 8192


def test_the_presets_are_the_seven_documented_ones() -> None:
    assert preset_names() == (
        "gemma-2-9b",
        "llama-3.1-70b",
        "llama-3.1-8b",
        "mistral-7b",
        "qwen3-30b-a3b",
        "qwen3-32b",
        "qwen3-8b",
    )


def test_every_preset_says_its_dtype_and_sizes() -> None:
    for name in preset_names():
        config = json.loads((PRESETS / f"{name}.json").read_text())
        assert config["torch_dtype"] == "bfloat16"
        assert all(config[field] > 0 for field in ("hidden_size", "intermediate_size", "vocab_size"))


# ---- finding the file


def test_a_file_and_the_folder_that_holds_it_give_the_same_model_named_after_the_folder(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    path = write(folder, LLAMA)
    assert load_model(path) == load_model(str(folder))
    assert load_model(path).name == "my-llama"
    other = folder / "tiny.json"
    other.write_text(json.dumps(LLAMA))
    assert load_model(str(other)).name == "tiny"


def test_config_json_in_the_current_folder_is_named_after_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, LLAMA)
    monkeypatch.chdir(tmp_path)
    assert load_model("config.json").name == load_model(".").name == tmp_path.name


def test_a_folder_called_like_a_preset_is_reached_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen3-8b").mkdir()
    write(tmp_path / "qwen3-8b", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert len(load_model("qwen3-8b").layers) == 36
    assert len(load_model("./qwen3-8b").layers) == 4


@pytest.mark.parametrize("name", ["qwen3-9b", "", "no/such/folder", "x" * 5000, "nul\0byte", "../presets/qwen3-8b"])
def test_an_unknown_name_lists_the_presets(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert all(preset in str(caught.value) for preset in preset_names())


def test_a_folder_without_a_config_and_a_device_are_no_models(tmp_path: Path) -> None:
    for path in (str(tmp_path), os.devnull):
        with pytest.raises(ModelError, match="neither a preset nor"):
            load_model(path)


def test_an_unreadable_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    path = write(tmp_path, LLAMA)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: Permission denied$"):
        load_model(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\xff", "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b"[1]", "must hold a JSON object, holds list"),
        (b"null", "must hold a JSON object, holds NoneType"),
        (b'"qwen3-8b"', "must hold a JSON object, holds str"),
        (b"[" * 15_000, "nested too deeply"),
        (b'{"a":' * 3_900, "(nested too deeply|not JSON)"),  # later Pythons count levels of C apart, and allow more
        (b"[]," * 1_000_000, "too many values for its size"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=rf"config\.json: .*{reason}"):
        load_model(str(tmp_path))


@pytest.mark.skipif(not hasattr(sys, "get_int_max_str_digits"), reason="this Python reads numbers of any length")
def test_a_number_of_ten_thousand_digits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": ' + "9" * 10_000 + "}")
    with pytest.raises(ModelError, match="not JSON"):
        load_model(str(tmp_path))


# ---- splitting over ranks


@pytest.mark.parametrize(("tp", "heads", "kv_heads"), [(1, 32, 8), (2, 16, 4), (8, 4, 1), (16, 2, 1), (32, 1, 1)])
def test_heads_are_split_over_ranks_and_kv_heads_replicated_beyond_their_number(
    tmp_path: Path, tp: int, heads: int, kv_heads: int
) -> None:
    (group,) = load(tmp_path).layer_groups(tp, 16, None)
    assert (group.num_qo_heads, group.num_kv_heads, group.num_layers) == (heads, kv_heads, 4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "message"),
    [
        (32, 8, 3, r"32 query heads .* tp=3"),
        (32, 8, 64, r"32 query heads .* tp=64"),
        (24, 4, 3, r"4 KV heads .* tp=3"),  # fewer ranks than KV heads: they must divide
        (24, 4, 6, r"4 KV heads .* tp=6"),  # more ranks: each head needs the same number of copies
    ],
)
def test_heads_that_do_not_divide_over_the_ranks_are_refused(
    tmp_path: Path, heads: int, kv_heads: int, tp: int, message: str
) -> None:
    model = load(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads)
    with pytest.raises(ModelError, match=message):
        model.layer_groups(tp, 16, None)


@pytest.mark.parametrize("tp", [0, -1, True, 1.0, "2", None])
def test_a_number_of_ranks_that_is_none_is_refused(tp: Any) -> None:
    with pytest.raises(ModelError, match="qwen3-8b: tp="):
        load_model("qwen3-8b").layer_groups(tp, 16, None)


@pytest.mark.parametrize(
    ("page_size", "kv_dtype", "field"),
    [(0, None, "page_size"), ("16", None, "page_size"), (16, "fp16", "kv_dtype"), (16, ["fp8"], "kv_dtype")],
)
def test_what_the_spec_refuses_is_an_error_that_names_the_model(page_size: Any, kv_dtype: Any, field: str) -> None:
    with pytest.raises(ModelError, match=f"^qwen3-8b: {field}="):
        load_model("qwen3-8b").layer_groups(1, page_size, kv_dtype)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e4m3"])
def test_fp8_is_what_engines_mean_by_it(kv_dtype: str) -> None:
    (group,) = load_model("qwen3-8b").layer_groups(1, 16, kv_dtype)
    assert group.kv_dtype == "fp8_e4m3"


@pytest.mark.parametrize("kv_dtype", [None, "auto", "fp16"])
def test_an_automatic_kv_dtype_is_the_activations(tmp_path: Path, kv_dtype: str | None) -> None:
    (group,) = load(tmp_path, torch_dtype="float16").layer_groups(1, 16, kv_dtype)
    assert (group.dtype, group.kv_dtype) == ("fp16", "fp16")


# ---- fields


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "float32"}, "fp32"),
        ({"torch_dtype": "torch.float16"}, "fp16"),
        ({"dtype": "float16", "torch_dtype": GONE}, "fp16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "fp16"),
        ({"torch_dtype": GONE}, "bf16"),
    ],
)
def test_dtype_is_read_from_its_new_and_its_old_name(tmp_path: Path, fields: dict[str, Any], dtype: str) -> None:
    assert load(tmp_path, **fields).dtype == dtype


@pytest.mark.parametrize("absent", [GONE, None])
def test_without_kv_heads_each_query_head_has_its_own(tmp_path: Path, absent: object) -> None:
    assert load(tmp_path, num_key_value_heads=absent).layers[0].num_kv_heads == 32


@pytest.mark.parametrize("absent", [GONE, None])
def test_without_a_head_size_the_hidden_size_is_divided(tmp_path: Path, absent: object) -> None:
    assert load(tmp_path, head_dim=absent, hidden_size=2048).layers[0].head_dim_qk == 64
    with pytest.raises(ModelError, match="hidden_size=2049"):
        load(tmp_path, head_dim=absent, hidden_size=2049)


def test_a_value_head_size_of_its_own_is_kept_apart(tmp_path: Path) -> None:
    layer = load(tmp_path, head_dim=192, v_head_dim=128).layers[0]
    assert (layer.head_dim_qk, layer.head_dim_vo, layer.sm_scale) == (192, 128, 1 / math.sqrt(192))


def test_the_softmax_scale_is_the_models_own_where_it_gives_one(tmp_path: Path) -> None:
    assert load(tmp_path).layers[0].sm_scale == 1 / math.sqrt(128)
    assert load(tmp_path, query_pre_attn_scalar=144).layers[0].sm_scale == 1 / 12
    assert load(tmp_path, attention_multiplier=0.0078125).layers[0].sm_scale == 0.0078125


def test_only_gpt_oss_has_sinks(tmp_path: Path) -> None:
    assert not load(tmp_path).layers[0].has_sinks
    model = load(tmp_path, model_type="gpt_oss", head_dim=64, sliding_window=128)
    assert [group.has_sinks for group in model.layer_groups(1, 16, None)] == [True, True]
    assert windows(model) == [128, None, 128, None]


def test_a_multimodal_model_is_its_text_config_with_the_dtype_beside_it(tmp_path: Path) -> None:
    config = {
        "model_type": "mistral3",
        "torch_dtype": "float16",
        "num_hidden_layers": 99,
        "text_config": {k: v for k, v in LLAMA.items() if k != "torch_dtype"},
    }
    model = load_model(write(tmp_path, config))
    assert (model.dtype, len(model.layers)) == ("fp16", 4)


def test_gemma_3_publishes_little_and_the_rest_is_its_class(tmp_path: Path) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    }
    sliding, full = load_model(write(tmp_path, config)).layer_groups(1, 16, None)
    assert (sliding.num_qo_heads, sliding.num_kv_heads, sliding.head_dim_qk) == (8, 4, 256)
    assert (sliding.num_layers, sliding.sliding_window) == (29, 1024)  # every 6th of 34 is full: 5
    assert (full.num_layers, full.sliding_window, full.scale) == (5, None, 1 / 16)


def test_what_a_config_says_wins_over_its_class(tmp_path: Path) -> None:
    config = json.loads((PRESETS / "gemma-2-9b.json").read_text())
    for name in ("attn_logit_softcapping", "query_pre_attn_scalar", "head_dim", "sliding_window"):
        shorter = {field: value for field, value in config.items() if field != name}
        assert load_model(write(tmp_path, shorter)).layers == load_model("gemma-2-9b").layers
    assert load_model(write(tmp_path, config | {"attn_logit_softcapping": None})).layers[0].logits_soft_cap is None


# ---- which layers


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [None] * 4),
        ({"sliding_window": None}, [None] * 4),
        ({"sliding_window": 64}, [64] * 4),
        ({"sliding_window": 64, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 64, "use_sliding_window": True}, [64] * 4),
        # Qwen2 takes a missing switch as off.
        ({"sliding_window": 64, "model_type": "qwen2", "max_window_layers": 0}, [None] * 4),
        (
            {"sliding_window": 64, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 64],
        ),
        (
            {"sliding_window": 64, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0},
            [64] * 4,
        ),
        (
            {"sliding_window": 64, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4},
            [None] * 4,
        ),
        ({"sliding_window": 64, "model_type": "gemma2"}, [64, None, 64, None]),
        ({"sliding_window": 64, "sliding_window_pattern": 3}, [64, 64, None, 64]),
        ({"sliding_window": 64, "sliding_window_pattern": 1}, [None] * 4),
        ({"full_attention_interval": 2}, [None] * 2),
        (
            {
                "sliding_window": 64,
                "sliding_window_pattern": 2,
                "layer_types": ["full_attention", "sliding_attention", "linear_attention", "full_attention"],
            },
            [None, 64, None],
        ),
        ({"layer_types": ["mamba", "attention", "conv", "recurrent"]}, [None]),
        ({"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False}, [None] * 4),
    ],
)
def test_each_layer_has_the_window_that_the_config_gives_it(
    tmp_path: Path, fields: dict[str, Any], expected: list[int | None]
) -> None:
    assert windows(load(tmp_path, **fields)) == expected


def test_groups_are_ordered_by_first_appearance_and_count_their_layers(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention", "sliding_attention", "sliding_attention"]
    full, sliding = load(tmp_path, sliding_window=64, layer_types=kinds).layer_groups(1, 16, None)
    assert (full.sliding_window, full.num_layers) == (None, 1)
    assert (sliding.sliding_window, sliding.num_layers) == (64, 2)


def test_a_model_without_softmax_attention_has_nothing_to_serve(tmp_path: Path) -> None:
    for fields in ({"layer_types": ["linear_attention"] * 4}, {"full_attention_interval": 5}):
        with pytest.raises(ModelError, match="nothing to serve"):
            load(tmp_path, **fields)


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "field", "why"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank", "MLA"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "layer_types", "chunked_attention"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types", "3 entries for num_hidden_layers=4"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window", "missing"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size", "chunked"),
        ({"dual_chunk_attention_config": {"chunk_size": 9}}, "dual_chunk_attention_config", "chunk"),
        ({"alibi": True}, "alibi", "bias"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder", "cross-attention"),
        ({"global_head_dim": 512}, "global_head_dim", "head size"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern", "layer_types"),
        ({"num_key_value_heads": GONE, "multi_query": True}, "multi_query", "num_key_value_heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "num_attention_heads=32"),
        ({"model_type": "bert"}, "model_type", "encoder"),
        ({"architectures": ["EsmForMaskedLM"]}, "architectures", "encoder"),
        ({"torch_dtype": "int8"}, "torch_dtype", "bfloat16, float16, float32"),
        ({"dtype": "int8"}, "dtype", "bfloat16, float16, float32"),
        ({"text_config": []}, "text_config", "object"),
    ],
)
def test_what_is_not_served_says_which_file_which_field_and_why(
    tmp_path: Path, fields: dict[str, Any], field: str, why: str
) -> None:
    with pytest.raises(ModelError) as caught:
        load(tmp_path, **fields)
    for part in ("config.json", field, why):
        assert part in str(caught.value)


def test_missing_fields_are_named_all_at_once(tmp_path: Path) -> None:
    # Mamba has neither heads nor positions.
    mamba = {"model_type": "mamba", "num_hidden_layers": 48, "hidden_size": 1024, "state_size": 16}
    with pytest.raises(ModelError, match=r"missing num_attention_heads, max_position_embeddings$"):
        load_model(write(tmp_path, mamba))
    with pytest.raises(
        ModelError,
        match=r"missing num_hidden_layers, num_attention_heads, max_position_embeddings, hidden_size$",
    ):
        load_model(write(tmp_path, {}))


NUMBERS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
NUMBERS += ("v_head_dim", "max_position_embeddings", "sliding_window", "sliding_window_pattern")
NUMBERS += (
    "full_attention_interval",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "attn_logit_softcapping",
)


@pytest.mark.parametrize("value", ["32", "", -1, 0, math.nan, math.inf, True, False, [32], {"n": 32}, 10**400])
@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_of_the_wrong_kind_is_refused_by_file_and_field(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {field}="):
        load(tmp_path, **{field: value})


@pytest.mark.parametrize("field", ["model_type", "torch_dtype", "dtype"])
@pytest.mark.parametrize("value", [1, False, ["llama"], {"a": "b"}])
def test_a_text_of_the_wrong_kind_is_refused_by_file_and_field(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {field}="):
        load(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_sliding_window", "false"),
        ("use_sliding_window", 0),
        ("max_window_layers", -1),
        ("num_hidden_layers", 10_001),
        ("num_hidden_layers", 4.0),
        ("layer_types", "full_attention"),
        ("layer_types", [1, 2, 3, 4]),
        ("layer_types", [["full_attention"]] * 4),
        ("architectures", "LlamaForCausalLM"),
    ],
)
def test_another_field_of_the_wrong_kind_is_refused_by_file_and_field(
    tmp_path: Path, field: str, value: object
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {field}="):
        load(tmp_path, **{field: value})


@pytest.mark.parametrize(
    "fields", [{"num_hidden_layers": [["x" * 10_000] * 100] * 9}, {"layer_types": ["x" * 10_000] * 4}]
)
def test_an_endless_value_is_cut_in_the_message(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        load(tmp_path, **fields)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(1, 512) | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=6,
)
LAYER_TYPES = st.lists(
    st.sampled_from(["full_attention", "sliding_attention", "linear_attention", "chunked_attention", ""]),
    max_size=5,
)
MODEL_TYPES = st.sampled_from(["gemma2", "gemma3_text", "gpt_oss", "qwen2", "cohere2", "bert", ""])
FIELDS = (*NUMBERS, "use_sliding_window", "max_window_layers", "layer_types", "model_type", "architectures")
FIELDS += ("dtype", "torch_dtype", "text_config", "kv_lora_rank", "attn_layer_period", "multi_query")


@settings(max_examples=300, deadline=None)
@given(
    preset=st.sampled_from(preset_names()),
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON | LAYER_TYPES | MODEL_TYPES, max_size=4),
    removed=st.sets(st.sampled_from(FIELDS), max_size=3),
    nested=st.booleans(),
    tp=st.integers(1, 16),
)
def test_any_change_to_a_config_gives_groups_or_a_model_error(
    tmp_path_factory: pytest.TempPathFactory,
    preset: str,
    changes: dict[str, Any],
    removed: set[str],
    nested: bool,
    tp: int,
) -> None:
    config = json.loads((PRESETS / f"{preset}.json").read_text()) | changes
    config = {name: value for name, value in config.items() if name not in removed}
    path = write(tmp_path_factory.getbasetemp(), {"text_config": config} if nested else config)
    try:
        model = load_model(path)
        groups = model.layer_groups(tp, 16, None)
    except ModelError as error:
        assert str(error)
    else:
        assert sum(group.num_layers for group in groups) == len(model.layers) > 0


PIECES = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"null",
    b"9" * 400,
    b"1e999",
    b"-",
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
]
PIECES += [json.dumps({name: value})[1:-1].encode() for name, value in LLAMA.items()]


@settings(max_examples=300, deadline=None)
@given(content=st.binary() | st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=16).map(b"".join))
def test_any_bytes_are_a_model_or_a_model_error_that_names_the_file_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_bytes(content)
    try:
        model = load_model(str(path))
    except ModelError as error:
        assert str(error).startswith(f"{path}: ")
        assert "\n" not in str(error)
    else:
        assert model.layers


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_config_that_is_damaged_anywhere_is_a_model_or_a_model_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray((PRESETS / f"{data.draw(st.sampled_from(preset_names()))}.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 8))] = data.draw(
            st.sampled_from(PIECES) | st.binary(max_size=4)
        )
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_bytes(content)
    try:
        assert load_model(str(path)).layers
    except ModelError as error:
        assert str(error).startswith(f"{path}")
        assert "\n" not in str(error)

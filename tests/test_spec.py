"""AttentionSpec: what it refuses, what it derives, and its plain form."""

from __future__ import annotations

import json
import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.errors import SpecError
from dispatch.spec import AttentionSpec
from tests.make import make_spec

COUNTS = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "num_layers")
SCALES = ("k_scale", "v_scale", "sm_scale", "logits_soft_cap")

counts = st.integers(1, 2**40)
gaps = st.integers(0, 2**10)  # a stride that holds 64 heads and 2^40 tokens in any order is below 2^63 with them
scales = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@st.composite
def strides_apart(draw: st.DrawFn, sizes: tuple[int, int], width: int) -> tuple[int, int, int]:
    """Strides of pages and, in either order of nesting, of the two dimensions in them, with gaps between all."""
    inner, taken = [0, 0], width
    for at in draw(st.permutations((0, 1))):
        inner[at] = taken + draw(gaps)
        taken += inner[at] * (sizes[at] - 1)
    return taken + draw(gaps), inner[0], inner[1]


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    kv_heads, group = draw(st.integers(1, 64)), draw(st.integers(1, 32))
    dtype = draw(st.sampled_from(("bf16", "fp16", "fp32")))
    k_width, v_width = (8 * draw(st.integers(1, 64)) for _ in "kv")
    page_size, layout = draw(counts), draw(st.sampled_from(("NHD", "HND")))
    sizes = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
    return AttentionSpec(
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim_qk=k_width,
        head_dim_vo=v_width,
        page_size=page_size,
        num_layers=draw(counts),
        dtype=dtype,
        kv_dtype=draw(st.sampled_from((dtype, "fp8_e4m3"))),
        kv_layout=layout,
        kv_strides=draw(st.none() | strides_apart(sizes, max(k_width, v_width))),
        q_stride=draw(st.none() | gaps.map(lambda gap: kv_heads * group * k_width + gap)),
        k_scale=draw(scales),
        v_scale=draw(scales),
        sm_scale=draw(st.none() | scales),
        sliding_window=draw(st.none() | counts),
        logits_soft_cap=draw(st.none() | scales),
        has_sinks=draw(st.booleans()),
    )


# --- refusals


@pytest.mark.parametrize("field", [*COUNTS, "sliding_window"])
@pytest.mark.parametrize("value", [0, -8, True, 8.0, "8", [8], 2**63, 10**400], ids=lambda v: str(v)[:20])
def test_a_count_that_is_no_whole_number_above_0_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"^{field}="):
        make_spec(**{field: value})


@pytest.mark.parametrize("field", COUNTS)
def test_a_count_must_be_given(field: str) -> None:
    with pytest.raises(SpecError, match=f"^{field}=None"):
        make_spec(**{field: None})


@pytest.mark.parametrize("field", SCALES)
@pytest.mark.parametrize(
    "value", [0, 0.0, -1.0, math.nan, math.inf, True, "1", [1.0], 10**400], ids=lambda v: str(v)[:20]
)
def test_a_scale_that_is_no_finite_number_above_0_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"^{field}="):
        make_spec(**{field: value})


@pytest.mark.parametrize("field", ["k_scale", "v_scale"])
def test_a_cache_always_has_scales(field: str) -> None:
    with pytest.raises(SpecError, match=f"^{field}=None"):
        make_spec(**{field: None})


@pytest.mark.parametrize("value", [0, -1, True, 8 * 64 - 1, 512.0])
def test_queries_that_would_overlap_are_refused(value: object) -> None:
    with pytest.raises(SpecError, match=r"^q_stride="):
        make_spec(num_qo_heads=8, head_dim_qk=64, q_stride=value)
    assert make_spec(num_qo_heads=8, head_dim_qk=64, q_stride=8 * 64).q_stride == 512


@pytest.mark.parametrize("value", [0, 1, None, "true", []])
def test_sinks_are_there_or_not(value: object) -> None:
    with pytest.raises(SpecError, match=r"^has_sinks="):
        make_spec(has_sinks=value)


def test_query_heads_must_divide_among_kv_heads() -> None:
    with pytest.raises(SpecError, match="num_qo_heads=8 is not divisible by num_kv_heads=3"):
        make_spec(num_kv_heads=3)


@pytest.mark.parametrize("field", ["head_dim_qk", "head_dim_vo"])
@pytest.mark.parametrize("value", [4, 12, 65])  # rows of 16-bit values are read 16 bytes, 8 values, at a time
def test_a_head_dim_that_cannot_be_read_in_16_bytes_is_refused(field: str, value: int) -> None:
    with pytest.raises(SpecError, match=f"^{field}={value}: must be a multiple of 8"):
        make_spec(**{field: value})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "fp8_e4m3"}, "dtype"),  # activations are never fp8: the kernels that want it quantise
        ({"dtype": "auto"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"kv_dtype": "fp16"}, "kv_dtype"),  # beside bf16 queries
        ({"kv_dtype": "fp8"}, "kv_dtype"),
        ({"kv_dtype": ["bf16"]}, "kv_dtype"),
        ({"kv_layout": "nhd"}, "kv_layout"),
        ({"kv_layout": None}, "kv_layout"),
    ],
)
def test_an_unknown_type_or_layout_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=f"^{field}=.*must be one of"):
        make_spec(**changes)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_each_activation_type_goes_with_a_cache_of_its_own_or_of_fp8(dtype: str) -> None:
    for kv_dtype in (dtype, "fp8_e4m3"):
        assert make_spec(dtype=dtype, kv_dtype=kv_dtype).kv_dtype == kv_dtype


@pytest.mark.parametrize(
    "strides", [(), (4096, 256), (4096, 256, 64, 1), [4096, 256, 64], 64, "abc", (4096, 256, 0), (4096, -1, 64)]
)
def test_strides_that_are_not_three_whole_numbers_above_0_are_refused(strides: object) -> None:
    with pytest.raises(SpecError, match=r"^kv_strides="):
        make_spec(kv_strides=strides)


# --- slots that overlap


def accepts(**changes: Any) -> bool:
    """Whether there is such a spec. Any refusal but that of overlapping slots is an error."""
    try:
        make_spec(**changes)
    except SpecError as error:
        assert "slots overlap" in str(error)
        return False
    return True


def test_strides_that_lay_all_slots_on_each_other_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"^kv_strides=\(1, 1, 1\): slots overlap"):
        make_spec(kv_strides=(1, 1, 1))


# Of 16 tokens of 2 heads of 64 values, each stride just holds what is inside it: 64, then 2 x 64 or 16 x 64, then all.
@pytest.mark.parametrize(("layout", "dense"), [("NHD", (2048, 128, 64)), ("HND", (2048, 1024, 64))])
def test_dense_pages_are_accepted_and_an_element_less_in_any_stride_is_not(
    layout: str, dense: tuple[int, int, int]
) -> None:
    assert accepts(kv_layout=layout, kv_strides=dense)
    for at in range(3):
        short = tuple(stride - (i == at) for i, stride in enumerate(dense))
        assert not accepts(kv_layout=layout, kv_strides=short), short


# K and V of a slot side by side, 128 apart. The last slot of a head or page has no V of its own behind it: 64 less.
@pytest.mark.parametrize(("layout", "token", "head"), [("HND", 2, 1), ("NHD", 1, 2)])
def test_k_and_v_packed_in_a_slot_are_accepted_until_a_page_or_head_is_an_element_short(
    layout: str, token: int, head: int
) -> None:
    def packed(page_stride: int, head_stride: int) -> bool:
        strides = [page_stride, 0, 0]
        strides[token], strides[head] = 128, head_stride
        return accepts(kv_layout=layout, kv_strides=tuple(strides))

    assert packed(2 * 16 * 128, 16 * 128)
    assert packed(2 * 16 * 128 - 64, 16 * 128)
    assert not packed(2 * 16 * 128 - 65, 16 * 128)
    assert packed(2 * 16 * 128, 16 * 128 - 64)
    assert not packed(2 * 16 * 128, 16 * 128 - 65)


@pytest.mark.parametrize(("layout", "strides"), [("NHD", (2048, 64, 1024)), ("HND", (2048, 64, 128))])
def test_tokens_and_heads_may_lie_in_either_order(layout: str, strides: tuple[int, int, int]) -> None:
    assert accepts(kv_layout=layout, kv_strides=strides)


@pytest.mark.parametrize("widths", [{"head_dim_qk": 192, "head_dim_vo": 128}, {"head_dim_qk": 128, "head_dim_vo": 192}])
def test_slots_hold_the_wider_of_k_and_v(widths: dict[str, int]) -> None:
    assert accepts(kv_strides=(16 * 384, 384, 192), **widths)
    assert not accepts(kv_strides=(16 * 384, 384, 191), **widths)


# Views that torch makes where a rank has one KV head, or a page one token, may have any stride there: none is stepped.
@pytest.mark.parametrize("stride", [1, 64, 10**9])
@pytest.mark.parametrize(
    ("changes", "strides"),
    [
        ({"num_kv_heads": 1, "kv_layout": "NHD"}, (1024, 64, None)),
        ({"num_kv_heads": 1, "kv_layout": "HND"}, (1024, None, 64)),
        ({"page_size": 1, "kv_layout": "NHD"}, (128, None, 64)),
        ({"page_size": 1, "kv_layout": "HND"}, (128, 64, None)),
    ],
)
def test_the_stride_of_a_single_head_or_token_lays_nothing_on_anything(
    changes: dict[str, Any], strides: tuple[int | None, ...], stride: int
) -> None:
    given_strides = tuple(stride if each is None else each for each in strides)
    assert accepts(kv_strides=given_strides, **changes)
    assert not accepts(kv_strides=(given_strides[0] - 1, *given_strides[1:]), **changes)


def addresses(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Where each element lies."""
    places: list[int] = np.tensordot((*strides, 1), np.indices(shape), axes=1).ravel().tolist()
    return places


@pytest.mark.parametrize(("layout", "sizes"), [("NHD", (3, 2)), ("HND", (2, 3))])
def test_no_two_elements_share_memory_in_any_cache_that_is_accepted(layout: str, sizes: tuple[int, int]) -> None:
    shape = {"num_kv_heads": 2, "page_size": 3, "head_dim_qk": 8, "head_dim_vo": 8, "kv_layout": layout}
    every = list(product((40, 47, 48, 56, 64), *[(7, 8, 12, 15, 16, 17, 23, 24, 32)] * 2))
    accepted = [strides for strides in every if accepts(kv_strides=strides, **shape)]
    for strides in accepted:
        elements = addresses((4, *sizes, 8), strides)
        assert len(set(elements)) == len(elements), strides
    assert {strides[1] < strides[2] for strides in accepted} == {False, True}  # both orders were among them


# --- what follows from it


def test_the_softmax_scale_is_1_over_the_root_of_the_query_head_dim() -> None:
    assert make_spec(head_dim_qk=64, head_dim_vo=256).scale == 0.125


def test_a_softmax_scale_that_is_given_stays() -> None:
    assert make_spec(sm_scale=0.5).scale == 0.5


def test_group_size_counts_query_heads_for_each_kv_head() -> None:
    assert make_spec(num_qo_heads=12, num_kv_heads=3).group_size == 4


# 3 KV heads of 192 for K and 128 for V are 960 values, of 2 bytes or of 1
@pytest.mark.parametrize(("kv_dtype", "expected"), [("bf16", 1920), ("fp8_e4m3", 960)])
def test_bytes_of_a_token_are_those_of_k_and_v_in_the_cache(kv_dtype: str, expected: int) -> None:
    spec = make_spec(num_qo_heads=6, num_kv_heads=3, head_dim_qk=192, head_dim_vo=128, kv_dtype=kv_dtype)
    assert spec.kv_bytes_per_token == expected


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_page_that_is_begun_counts(tokens: int, pages: int) -> None:
    assert make_spec(page_size=16).max_pages(tokens) == pages


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "8/2 heads, d 64, page 16, bf16, 4 layers"),
        ({"head_dim_vo": 128}, "8/2 heads, d 64/128, page 16, bf16, 4 layers"),
        ({"kv_dtype": "fp8_e4m3"}, "8/2 heads, d 64, page 16, bf16, KV fp8_e4m3, 4 layers"),
        (
            {"sliding_window": 128, "logits_soft_cap": 50, "has_sinks": True},
            "8/2 heads, d 64, page 16, bf16, 4 layers, window 128, soft cap 50, sinks",
        ),
    ],
)
def test_describe_says_what_is_out_of_the_ordinary(changes: dict[str, Any], words: str) -> None:
    assert make_spec(**changes).describe() == words


# --- plain data


@settings(deadline=None)
@given(specs())
def test_a_spec_survives_json(spec: AttentionSpec) -> None:
    again = AttentionSpec.from_json(json.loads(json.dumps(spec.to_json(), allow_nan=False)))
    assert (again, hash(again)) == (spec, hash(spec))


@pytest.mark.parametrize("field", SCALES)
def test_a_scale_of_1_and_of_1_point_0_are_one_text(field: str) -> None:
    texts = {json.dumps(make_spec(**{field: one}).to_json()) for one in (1, 1.0)}
    assert len(texts) == 1


@pytest.mark.parametrize("field", COUNTS)
def test_plain_data_without_a_count_is_refused_by_name(field: str) -> None:
    data = make_spec().to_json()
    del data[field]
    with pytest.raises(SpecError, match=field):
        AttentionSpec.from_json(data)


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="rope_theta"):
        AttentionSpec.from_json({**make_spec().to_json(), "rope_theta": 10000})


@pytest.mark.parametrize("data", [None, 3, "spec", [], [["num_layers", 1]], {}])
def test_what_is_no_object_with_the_fields_is_refused(data: Any) -> None:
    with pytest.raises(SpecError, match="not an attention spec"):
        AttentionSpec.from_json(data)


@pytest.mark.parametrize("strides", [3, True, {}, "abc", [1, 2], [1, 2, "3"], [1, 2, 10**400]])
def test_plain_strides_of_another_kind_are_refused(strides: object) -> None:
    with pytest.raises(SpecError):
        AttentionSpec.from_json({**make_spec().to_json(), "kv_strides": strides})

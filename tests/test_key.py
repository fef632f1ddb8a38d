"""The key of a stored plan: whatever could change the answer changes it, and the difference has a name."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dispatch.backends import Registry, registry
from dispatch.bench.trace import Trace
from dispatch.config import DispatchConfig
from dispatch.device import DeviceFingerprint, current_device
from dispatch.eligible import eligible
from dispatch.errors import DispatchError
from dispatch.key import canonical, check_key, differences, digest
from dispatch.request import TuneRequest
from dispatch.spec import AttentionSpec
from dispatch.traits import EngineTraits
from tests.make import get_at, make_key, make_spec, paths, put_at


def trace_of(digest: str) -> Trace:
    return Trace(np.array([100]), np.array([10]), digest)


def request_of(**changes: Any) -> TuneRequest:
    sizes = {"spec": make_spec(), "buckets": (1, 8), "max_seq_len": 4096, "capacity": 8192}
    return TuneRequest(**{**sizes, "traces": (trace_of("0" * 16),), **changes})


DEVICE = current_device("cpu")


def key_of(request: TuneRequest, device: DeviceFingerprint = DEVICE, registry: Registry = registry) -> dict[str, Any]:
    """As obtain_plan makes it."""
    return request.key(device, registry, eligible(request, device, registry).default)


KEY = key_of(request_of(config=DispatchConfig(exclude=("torch_chunked",))))
LEAVES = [at for at in paths(KEY) if not isinstance(get_at(KEY, at), (dict, list))]


def field_at(at: tuple[Any, ...]) -> str:
    """The name that `differences` gives: objects are entered, lists are compared as a whole."""
    return ".".join(name for name in at if isinstance(name, str))


def others(value: Any) -> Iterator[Any]:
    """Values of the same kind that lie close to a leaf, and one of another kind."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (value + 1, value * 1.0000001 if value else 1e-9)
    elif isinstance(value, str):
        yield from (value + "0", value[:-1] if value else "1")
    yield "none" if value is None else None


# --- every field of a key counts


def test_the_key_is_plain_data_with_every_kind_of_leaf() -> None:
    assert json.loads(json.dumps(KEY)) == KEY
    assert {type(get_at(KEY, at)) for at in LEAVES} == {bool, int, float, str, type(None)}


@pytest.mark.parametrize("at", LEAVES, ids=lambda at: ".".join(map(str, at)))
def test_changing_a_leaf_changes_the_digest_and_is_named_as_the_only_difference(at: tuple[Any, ...]) -> None:
    for value in others(get_at(KEY, at)):
        changed = put_at(KEY, at, value)
        assert digest(changed) != digest(KEY)
        assert [line.partition(": the plan has ")[0] for line in differences(changed, KEY)] == [field_at(at)]


@pytest.mark.parametrize("at", LEAVES, ids=lambda at: ".".join(map(str, at)))
def test_a_leaf_too_few_changes_the_digest_and_is_named_from_both_sides(at: tuple[Any, ...]) -> None:
    less = copy.deepcopy(KEY)
    del get_at(less, at[:-1])[at[-1]]
    assert digest(less) != digest(KEY)
    for lines in (differences(less, KEY), differences(KEY, less)):
        assert [line.partition(": the plan has ")[0] for line in lines] == [field_at(at)]


def test_a_difference_shows_both_values() -> None:
    theirs = put_at(KEY, ("max_seq_len",), 2048)
    assert differences(theirs, KEY) == ["max_seq_len: the plan has 2048, here it is 4096"]


def test_a_field_that_one_side_lacks_is_told_from_one_that_is_none() -> None:
    assert len(differences({"trace": None}, {})) == len(differences({}, {"trace": None})) == 1


def test_differences_come_in_our_order_and_what_we_lack_comes_last() -> None:
    theirs = {"a": 1, "old": 1, "b": 1, "spec": {"x": {"y": 1}}}
    ours = {"spec": {"x": {"y": 2}}, "b": 2, "a": 2}
    assert [line[: line.index(":")] for line in differences(theirs, ours)] == ["spec.x.y", "b", "a", "old"]


def test_equal_keys_have_no_differences_even_after_json() -> None:
    again = json.loads(json.dumps(KEY))
    assert (differences(again, KEY), digest(again)) == ([], digest(KEY))


# --- every argument that could change the answer changes the key

SPEC_CHANGES: dict[str, dict[str, Any]] = {
    "num_qo_heads": {"num_qo_heads": 16},
    "num_kv_heads": {"num_kv_heads": 4},
    "head_dim_qk": {"head_dim_qk": 128, "sm_scale": 0.125},  # the scale that 64 has
    "head_dim_vo": {"head_dim_vo": 128},
    "page_size": {"page_size": 32},
    "num_layers": {"num_layers": 5},
    "dtype": {"dtype": "fp16", "kv_dtype": "fp8_e4m3"},
    "kv_dtype": {"kv_dtype": "bf16"},
    "kv_layout": {"kv_layout": "HND"},
    "kv_strides": {"kv_strides": (4096, 128, 64)},
    "q_stride": {"q_stride": 8192},
    "k_scale": {"k_scale": 0.5},
    "v_scale": {"v_scale": 0.5},
    "sm_scale": {"sm_scale": 0.25},
    "sliding_window": {"sliding_window": 128},
    "logits_soft_cap": {"logits_soft_cap": 30.0},
    "has_sinks": {"has_sinks": True},
}
REQUEST_CHANGES: dict[str, dict[str, Any]] = {
    "spec": {"spec": make_spec(num_layers=5)},
    "buckets": {"buckets": (1, 4, 8)},
    "max_seq_len": {"max_seq_len": 4095},
    "capacity": {"capacity": 8191},
    "config": {"config": DispatchConfig(threshold=0.04)},
    "default": {"default": "torch_chunked"},
    "traces": {"traces": (trace_of("1" * 16),)},
    "traits": {"traits": EngineTraits(plan_hidden=True)},
}
CONFIG_CHANGES: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.0301},
    "cluster_margin": {"cluster_margin": 0.0101},
    "exclude": {"exclude": ("torch_chunked",)},
}
CONFIG_WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "enabled": {"enabled": True},
    "time_budget_s": {"time_budget_s": 1.0},  # a partial plan is resumed, under the same key
    "capture_budget_s": {"capture_budget_s": 1.0},
    "capture_budget_mib": {"capture_budget_mib": 1.0},
    "isolation": {"isolation": "none"},
    "cache_dir": {"cache_dir": Path("elsewhere")},
}


@pytest.mark.parametrize(
    ("cls", "tried"),
    [
        (AttentionSpec, SPEC_CHANGES),
        (TuneRequest, REQUEST_CHANGES),
        (DispatchConfig, CONFIG_CHANGES | CONFIG_WITHOUT_EFFECT),
    ],
)
def test_no_argument_is_forgotten_here(cls: Any, tried: dict[str, Any]) -> None:
    assert [field.name for field in dataclasses.fields(cls) if field.name not in tried] == []


@pytest.mark.parametrize("field", SPEC_CHANGES)
def test_each_field_of_the_layer_changes_the_key_there_alone(field: str) -> None:
    fp8 = {"kv_dtype": "fp8_e4m3"}  # goes with every activation type
    plain, changed = (make_spec(**fp8), make_spec(**fp8 | SPEC_CHANGES[field]))
    lines = differences(key_of(request_of(spec=plain)), key_of(request_of(spec=changed)))
    assert [line[: line.index(":")] for line in lines if not line.startswith("default:")] == [f"spec.{field}"]


@pytest.mark.parametrize("field", REQUEST_CHANGES)
def test_each_argument_of_a_request_changes_the_key(field: str) -> None:
    assert digest(key_of(request_of(**REQUEST_CHANGES[field]))) != digest(key_of(request_of()))


@pytest.mark.parametrize("field", CONFIG_CHANGES)
def test_each_setting_that_decides_changes_the_key(field: str) -> None:
    config = DispatchConfig(**CONFIG_CHANGES[field])
    assert digest(key_of(request_of(config=config))) != digest(key_of(request_of()))


@pytest.mark.parametrize("field", CONFIG_WITHOUT_EFFECT)
def test_a_setting_that_decides_nothing_leaves_the_key_as_it_is(field: str) -> None:
    config = DispatchConfig(**CONFIG_WITHOUT_EFFECT[field])
    assert digest(key_of(request_of(config=config))) == digest(key_of(request_of()))


def test_a_request_without_a_trace_has_a_key_of_its_own() -> None:
    lines = differences(key_of(request_of(traces=())), key_of(request_of()))
    assert [line[: line.index(":")] for line in lines] == ["profiles", "traces.requests"]


def test_exclusions_in_another_order_are_the_same_key() -> None:
    request, names = request_of(), ("torch_chunked", "torch_sdpa")
    keys = [
        dataclasses.replace(request, config=DispatchConfig(exclude=order)).key(DEVICE, registry, "torch_sdpa")
        for order in (names, names[::-1])
    ]
    assert digest(keys[0]) == digest(keys[1])


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(DeviceFingerprint)])
def test_each_part_of_the_fingerprint_of_a_device_changes_the_key(field: str) -> None:
    device = dataclasses.replace(DEVICE, **{field: (8, 0) if field == "capability" else "other"})
    lines = differences(key_of(request_of()), key_of(request_of(), device))
    assert [line[: line.index(":")] for line in lines] == [f"device.{field}"]


def test_a_backend_more_or_in_another_order_changes_the_key() -> None:
    ours, names = key_of(request_of()), registry.names()
    longer, turned = Registry(), Registry()
    for name in (*names, "later"):
        longer.register(name, lambda name=name: type(registry.get(name if name in names else names[0])))
    for name in names[::-1]:
        turned.register(name, lambda name=name: type(registry.get(name)))
    lines = differences(key_of(request_of(), registry=longer), ours)
    assert [line[: line.index(":")] for line in lines] == ["priority", "backends.later"]
    lines = differences(request_of().key(DEVICE, turned, ours["default"]), ours)
    assert [line[: line.index(":")] for line in lines] == ["priority"]


# --- text and digest


def test_the_text_does_not_depend_on_the_order_of_fields() -> None:
    assert canonical({"b": 1, "a": {"d": 2, "c": 3}}) == canonical({"a": {"c": 3, "d": 2}, "b": 1})


def test_the_digest_is_the_sha256_of_the_text() -> None:
    assert digest({"b": 0.03, "a": [1, None]}) == hashlib.sha256(b'{"a":[1,null],"b":0.03}').hexdigest()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_key_has_no_number_that_json_lacks(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical({"threshold": value})


# --- check_key


def test_a_real_key_passes_the_check_as_it_is() -> None:
    assert check_key(KEY) is KEY


def test_the_tests_own_key_has_the_fields_of_a_real_one() -> None:
    assert list(make_key()) == list(KEY)
    assert check_key(make_key())


@pytest.mark.parametrize("field", ["spec", "buckets", "backends"])
def test_a_key_without_a_field_that_deciding_needs_is_refused_by_name(field: str) -> None:
    key = make_key()
    del key[field]
    with pytest.raises(ValueError, match=f"^{field}: missing"):
        check_key(key)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spec", None),
        ("spec", []),
        ("spec", {}),
        ("spec", {**make_spec().to_json(), "page_size": 0}),
        ("spec", {**make_spec().to_json(), "k_scale": 10**400}),
        ("spec", {**make_spec().to_json(), "head_dim_qk": 8 * 10**400, "sm_scale": None}),
        ("buckets", None),
        ("buckets", 8),
        ("buckets", {"8": 1}),
        ("buckets", []),
        ("buckets", [0]),
        ("buckets", [8, 1]),
        ("buckets", ["8"]),
        ("buckets", [8.0]),
        ("buckets", [True]),
        ("buckets", [2**63]),
        ("backends", None),
        ("backends", ["torch_sdpa"]),
        ("backends", {"torch_sdpa": None}),
        ("backends", {"torch_sdpa": 2.6}),
        ("backends", {"\ud800": "2.6.0"}),
    ],
    ids=lambda value: ascii(value)[:24],
)
def test_nonsense_in_a_field_that_deciding_needs_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises((ValueError, DispatchError), match=f"^{field}: "):
        check_key(make_key(**{field: value}))


@pytest.mark.parametrize("value", [None, 1, "key", [], [["spec", {}]]])
def test_a_key_is_an_object(value: object) -> None:
    with pytest.raises(ValueError, match="is not an object"):
        check_key(value)


def test_an_engine_that_can_hold_a_page_more_or_fewer_than_the_last_time_finds_its_plan() -> None:
    # 437136 and 437120 tokens; every 32768 of them, from 2 to the power of 18 on, is another key
    keys = {digest(key_of(request_of(capacity=capacity))) for capacity in (425984, 437120, 437136, 458751)}
    assert len(keys) == 1
    assert digest(key_of(request_of(capacity=458752))) not in keys

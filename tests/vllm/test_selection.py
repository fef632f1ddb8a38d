"""Which backend vLLM's layers get: ours in the place of the default, unless the user or vLLM says otherwise."""

from __future__ import annotations

import logging

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend

from dispatch.errors import ConfigError
from dispatch.plugins.vllm import SELECTED, register

ENV = "ENABLE_DYNAMIC_DECODE_BACKEND"


@pytest.fixture
def switched_on(monkeypatch):
    monkeypatch.setenv(ENV, "1")
    register()


def backend_of(config, **layer):
    """What a layer of this model gets."""
    with set_current_vllm_config(config):
        return get_attn_backend(128, torch.bfloat16, "auto", num_heads=32, **layer)


def test_the_default_gives_way(switched_on, config):
    from dispatch.plugins.vllm.backend import DynamicBackend, DynamicBuilder, DynamicImpl

    found = backend_of(config())
    assert found is DynamicBackend
    assert (found.get_impl_cls(), found.get_builder_cls()) == (DynamicImpl, DynamicBuilder)
    assert found.get_name() == "FLASH_ATTN"


def test_it_is_loaded_once_however_often_it_is_called(switched_on):
    register()
    for place in (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.CUSTOM):
        assert place.get_path() == SELECTED


@pytest.mark.parametrize("value", [None, "0", ""])
def test_switched_off_nothing_is_registered(monkeypatch, config, value):
    monkeypatch.delenv(ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(ENV, value)
    register()
    assert not AttentionBackendEnum.FLASH_ATTN.is_overridden()
    assert backend_of(config()) is FlashAttentionBackend


def test_a_value_that_cannot_be_read_is_told_at_start(monkeypatch):
    monkeypatch.setenv(ENV, "perhaps")
    with pytest.raises(ConfigError, match=f"{ENV}"):
        register()


def test_what_the_package_logs_is_shown_as_vllms_lines_are(monkeypatch):
    rest = logging.getLogger("dispatch")
    monkeypatch.setattr(rest, "handlers", [])
    monkeypatch.setattr(rest, "propagate", True)
    monkeypatch.setenv(ENV, "1")
    register()
    assert rest.handlers == logging.getLogger("vllm").handlers != []
    assert not rest.propagate
    assert logging.getLogger("dispatch.obtain").isEnabledFor(logging.INFO)


def test_a_handler_of_the_users_own_stays(monkeypatch):
    rest, own = logging.getLogger("dispatch"), logging.NullHandler()
    monkeypatch.setattr(rest, "handlers", [own])
    monkeypatch.setattr(rest, "propagate", True)
    monkeypatch.setenv(ENV, "1")
    register()
    assert rest.handlers == [own]
    assert rest.propagate


def test_another_version_is_left_alone(monkeypatch, caplog):
    monkeypatch.setenv(ENV, "1")
    monkeypatch.setattr("dispatch.plugins.vllm.version", lambda name: "0.33.0")
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        register()
    assert not AttentionBackendEnum.FLASH_ATTN.is_overridden()
    assert "0.33.0" in caplog.text


def test_what_another_plugin_has_registered_stays(monkeypatch, caplog):
    from vllm.v1.attention.backends.registry import register_backend

    monkeypatch.setenv(ENV, "1")
    register_backend(AttentionBackendEnum.CUSTOM, "their.module.Backend")
    register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "their.module.Backend"
    assert not AttentionBackendEnum.FLASH_ATTN.is_overridden()


def test_the_place_for_custom_backends_is_ours_too(switched_on, config):
    from dispatch.plugins.vllm.backend import DynamicBackend

    assert backend_of(config(attention_config={"backend": "CUSTOM"})) is DynamicBackend


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"attention_config": {"backend": "FLASH_ATTN"}}, "named the attention backend: FLASH_ATTN"),
        ({"attention_config": {"backend_per_kind": {"full_attention": "FLASH_ATTN"}}}, "FLASH_ATTN"),
        ({"enforce_eager": True}, "enforce_eager"),
        ({"attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 16}}, "num_splits_for_cuda_graph=16"),
        ({"attention_config": {"flash_attn_version": 2}}, "flash_attn_version=2"),
    ],
)
def test_what_the_user_has_set_stays(switched_on, config, caplog, given, why):
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert backend_of(config(**given)) is FlashAttentionBackend
        assert backend_of(config(**given)) is FlashAttentionBackend
    lines = [record.message for record in caplog.records if record.name == "vllm.decode_dispatch"]
    assert len(lines) == 1
    assert why in lines[0]


@pytest.mark.parametrize(("name", "why"), [("VLLM_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT"), ("V1", "V1 model runner")])
def test_modes_of_vllm_that_leave_it_alone(switched_on, config, caplog, monkeypatch, name, why):
    monkeypatch.setenv(*(("VLLM_USE_V2_MODEL_RUNNER", "0") if name == "V1" else (name, "1")))
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert backend_of(config()) is FlashAttentionBackend
    assert why in caplog.text


def test_another_backend_that_the_user_names_is_not_touched(switched_on, config):
    found = backend_of(config(attention_config={"backend": "TRITON_ATTN"}))
    assert found.get_name() == "TRITON_ATTN"


def test_without_a_configuration_it_is_vllms_own(switched_on):
    assert AttentionBackendEnum.FLASH_ATTN.get_class() is FlashAttentionBackend


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"treshold": 0.1}, "settings are threshold, cluster_margin"),
        ({"enabled": True}, "settings are threshold"),  # only the environment switches
        ({"threshold": "much"}, "--dyn_decode_threshold"),
        ("fast", "settings are threshold"),
    ],
)
def test_settings_that_cannot_be_read_are_told_at_start(switched_on, config, settings, why):
    with pytest.raises(ConfigError, match=why):
        backend_of(config(additional_config={"dynamic_decode": settings}))


OWN_KERNEL = ({"mode": 0}, {"custom_ops": ["+quant_fp8"]}, {"custom_ops": ["all"]})
"""compilation_config's with which a layer's quantisation of Q is a kernel of its own."""


@pytest.mark.parametrize("compilation", [{}, {"mode": 2}, {"custom_ops": ["all", "-quant_fp8"]}])
def test_where_the_quantisation_of_q_is_fused_the_layers_are_vllms(switched_on, config, caplog, compilation):
    with caplog.at_level(logging.WARNING, "vllm.decode_dispatch"):
        assert backend_of(config(kv_cache_dtype="fp8", compilation_config=compilation)) is FlashAttentionBackend
    assert '{"custom_ops": ["+quant_fp8"]}' in caplog.text


@pytest.mark.parametrize("compilation", OWN_KERNEL)
def test_where_the_quantisation_of_q_is_a_kernel_of_its_own_it_may_be_ours(switched_on, config, compilation):
    from dispatch.plugins.vllm.backend import DynamicBackend

    assert backend_of(config(kv_cache_dtype="fp8", compilation_config=compilation)) is DynamicBackend

"""What importing costs, what is exported, and what the wheel promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dispatch

KERNEL_LIBRARIES = ("flashinfer", "cudnn", "flash_attn_interface", "triton")


def loaded_after(code, *modules):
    code = f"import sys\n{code}\nprint(*[m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_importing_the_package_imports_neither_torch_nor_a_kernel_library():
    assert loaded_after("import dispatch", "torch", *KERNEL_LIBRARIES) == []


def test_switched_off_what_vllm_loads_of_us_imports_nothing_more():
    code = "from dispatch.plugins.vllm import register\nregister()"
    assert loaded_after(code, "torch", "numpy", "vllm", *KERNEL_LIBRARIES) == []


def test_asking_every_built_in_backend_imports_no_kernel_library_on_a_cpu():
    code = """
import torch
before = set(sys.modules)
from dispatch import current_device, load_model, registry
spec, = load_model("qwen3-8b").layer_groups(1, 16, None)
for name in registry.names():
    registry.support(name, spec, current_device("cpu"))
for name in before:  # torch may bring triton itself
    sys.modules.pop(name) if name.split(".")[0] == "triton" else None
"""
    assert loaded_after(code, *KERNEL_LIBRARIES) == []


@pytest.mark.parametrize("module", ["selector", "regimes", "samplesfile", "conclude"])
def test_deciding_needs_numpy_alone(module):
    assert loaded_after(f"import dispatch.{module}", "torch") == []


def test_every_exported_name_is_there_and_no_other():
    assert sorted(dispatch.__all__) == [
        "AttentionSpec",
        "Backend",
        "BackendPlan",
        "BuiltImpls",
        "Candidate",
        "DecodeGraphRunner",
        "DecodeImpl",
        "DeviceFingerprint",
        "DispatchConfig",
        "DispatchError",
        "EngineFacts",
        "EngineTraits",
        "LayerGroup",
        "Obtained",
        "PlanEntry",
        "StepInputs",
        "Store",
        "Support",
        "TuneRequest",
        "add_arguments",
        "capture_buckets",
        "current_device",
        "get_include",
        "kernel_page_size",
        "kv_grid",
        "load_model",
        "obtain_plan",
        "prepare_fmha_impl",
        "registry",
        "select_stable",
    ]
    for name in dispatch.__all__:
        assert getattr(dispatch, name).__module__.startswith("dispatch") or name == "registry"


def test_a_name_that_is_not_exported_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dispatch' has no attribute 'nothing'"):
        _ = dispatch.nothing


def test_the_package_is_marked_as_typed():
    assert (Path(dispatch.__file__).parent / "py.typed").exists()

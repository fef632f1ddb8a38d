"""decode-dispatch: measure decode attention kernels where they will run, and use the stably fastest.

Importing this package imports no kernel library, and torch only with the names that need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch._core import BackendPlan as BackendPlan
    from dispatch._core import PlanEntry as PlanEntry
    from dispatch._core import kernel_page_size as kernel_page_size
    from dispatch.backends import Backend as Backend
    from dispatch.backends import DecodeImpl as DecodeImpl
    from dispatch.backends import Support as Support
    from dispatch.backends import registry as registry
    from dispatch.candidate import Candidate as Candidate
    from dispatch.config import DispatchConfig as DispatchConfig
    from dispatch.config import add_arguments as add_arguments
    from dispatch.device import DeviceFingerprint as DeviceFingerprint
    from dispatch.device import current_device as current_device
    from dispatch.engine import BuiltImpls as BuiltImpls
    from dispatch.engine import DecodeGraphRunner as DecodeGraphRunner
    from dispatch.engine import EngineFacts as EngineFacts
    from dispatch.engine import LayerGroup as LayerGroup
    from dispatch.engine import prepare_fmha_impl as prepare_fmha_impl
    from dispatch.errors import DispatchError as DispatchError
    from dispatch.grid import capture_buckets as capture_buckets
    from dispatch.grid import kv_grid as kv_grid
    from dispatch.include_path import get_include as get_include
    from dispatch.models import load_model as load_model
    from dispatch.obtain import Obtained as Obtained
    from dispatch.obtain import obtain_plan as obtain_plan
    from dispatch.request import TuneRequest as TuneRequest
    from dispatch.selector import select_stable as select_stable
    from dispatch.spec import AttentionSpec as AttentionSpec
    from dispatch.step import StepInputs as StepInputs
    from dispatch.store import Store as Store
    from dispatch.traits import EngineTraits as EngineTraits

__version__ = "0.1.0"  # a literal, which the build reads without an import

_HOME = {
    "AttentionSpec": "dispatch.spec",
    "Backend": "dispatch.backends",
    "BackendPlan": "dispatch._core",
    "BuiltImpls": "dispatch.engine",
    "Candidate": "dispatch.candidate",
    "DecodeGraphRunner": "dispatch.engine",
    "DecodeImpl": "dispatch.backends",
    "DeviceFingerprint": "dispatch.device",
    "DispatchConfig": "dispatch.config",
    "DispatchError": "dispatch.errors",
    "EngineFacts": "dispatch.engine",
    "EngineTraits": "dispatch.traits",
    "LayerGroup": "dispatch.engine",
    "Obtained": "dispatch.obtain",
    "PlanEntry": "dispatch._core",
    "StepInputs": "dispatch.step",
    "Store": "dispatch.store",
    "Support": "dispatch.backends",
    "TuneRequest": "dispatch.request",
    "add_arguments": "dispatch.config",
    "capture_buckets": "dispatch.grid",
    "current_device": "dispatch.device",
    "get_include": "dispatch.include_path",
    "kernel_page_size": "dispatch._core",
    "kv_grid": "dispatch.grid",
    "load_model": "dispatch.models",
    "obtain_plan": "dispatch.obtain",
    "prepare_fmha_impl": "dispatch.engine",
    "registry": "dispatch.backends",
    "select_stable": "dispatch.selector",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dispatch' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Each FlashInfer backend runs a step against the functions that a version of FlashInfer has, read from its sources.

Not imported: 0.6.14 asks for a GPU when it is. Plain `pytest` reads the installed version. The variable
FLASHINFER_SOURCES names other folders with an installed package instead, separated as in PATH.
"""

from __future__ import annotations

import ast
import inspect
import os
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from dispatch.backends import flashinfer_cudnn, registry
from dispatch.backends.registry import BUILT_IN
from dispatch.bench.pool import PagedPool
from tests.eligibility import H200, layer

CPU = torch.device("cpu")
SOURCES = os.environ.get("FLASHINFER_SOURCES")
BACKENDS = [name for name in BUILT_IN if name.startswith("flashinfer_")]
LAYERS = [  # together they pass every optional argument
    layer(),
    layer(kv_dtype="fp8_e4m3", k_scale=0.25, v_scale=0.5),
    layer(sliding_window=128),
    layer(logits_soft_cap=30.0),
    layer(has_sinks=True),
    layer(kv_layout="HND"),
]
# The parameters that take what is passed by position. In another order they would take it as well, and be wrong.
FA2 = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__": "self float_workspace_buffer",
    "BatchDecodeWithPagedKVCacheWrapper.plan": "self indptr indices last_page_len",
    "fast_decode_plan": "self indptr indices last_page_len",
    "BatchDecodeWithPagedKVCacheWrapper.run": "self q paged_kv_cache",
}
BY_POSITION = {
    "flashinfer_fa2": FA2,
    "flashinfer_fa2_tc": FA2,
    "flashinfer_xqa": {
        "xqa": "q k_cache v_cache page_table seq_lens output workspace_buffer semaphores num_kv_heads page_size",
    },
    "flashinfer_cudnn": {
        "prepare_cudnn_batch_decode": "q k_cache v_cache scale",
        "CudnnDecodeGraph.run": "self q k_cache v_cache out lse workspace_buffer",
    },
    "flashinfer_trtllm_gen": {
        "trtllm_batch_decode_with_kv_cache": "query kv_cache workspace_buffer block_tables seq_lens max_seq_len",
    },
}


def signature_of(function):
    """Without *args and **kwargs, which would take anything."""
    arguments = function.args
    arguments.vararg = arguments.kwarg = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return inspect.signature(eval(f"lambda {ast.unparse(arguments)}: None"))


class Library:
    """FlashInfer with nothing behind its signatures; notes which parameters were given by position."""

    def __init__(self, folder):
        self.folder, self.by_position = folder, {}

    def load(self, name):
        """A module, in place of importlib.import_module."""
        module = SimpleNamespace()
        for node in ast.parse(self.folder.joinpath(*name.split(".")).with_suffix(".py").read_text()).body:
            if isinstance(node, ast.FunctionDef):  # of an overloaded one, the last is the real one
                setattr(module, node.name, self.function(node.name, node, module))
            elif isinstance(node, ast.ClassDef):
                setattr(module, node.name, self.class_of(node, module))
        return module

    def function(self, name, node, module):
        signature, returns = signature_of(node), node.returns and ast.unparse(node.returns)

        def call(*args, **kwargs):
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
            self.by_position[name] = " ".join(list(signature.parameters)[: len(args)])
            returned = getattr(module, returns, None) if returns else None
            return object.__new__(returned) if isinstance(returned, type) else None

        return call

    def class_of(self, node, module):
        """Its methods, and whatever its constructor sets."""
        methods = {member.name: member for member in node.body if isinstance(member, ast.FunctionDef)}
        constructor = ast.walk(methods["__init__"]) if "__init__" in methods else ()
        stored = [n.attr for n in constructor if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
        content = {attribute: MagicMock() for attribute in stored}
        for name, method in methods.items():
            real = methods.get(f"_{name}_impl", method)  # 0.7.4's plan hands its keywords on
            content[name] = self.function(f"{node.name}.{name}", real, module)
        return type(node.name, (), content)


def folder_name(folder):
    return "installed" if folder is None else Path(folder).name


@pytest.fixture(params=[None] if SOURCES is None else SOURCES.split(os.pathsep), ids=folder_name)
def library(request, monkeypatch):
    folder = request.param
    if folder is None:
        installed = find_spec("flashinfer")
        if installed is None:
            pytest.skip("FlashInfer is not installed")
        folder = Path(installed.origin).parents[1]
    found = Library(Path(folder))
    monkeypatch.syspath_prepend(folder)  # where a backend looks for FlashInfer and for its version
    monkeypatch.setattr("dispatch.backends.base.find_spec", lambda name: object())
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: flashinfer_cudnn.CUDNN_SINCE)
    for name in BACKENDS:
        module = inspect.getmodule(type(registry.get(name)))
        monkeypatch.setattr(module, "importlib", SimpleNamespace(import_module=found.load))
    return found


def step(backend, spec):
    pool = PagedPool(spec, 4, 1, CPU)
    inputs, chain = pool.inputs(2, 64), pool.chain(2)
    scratch = torch.empty(backend.workspace_bytes(spec, 2, 64), dtype=torch.uint8)
    impl = backend.build(spec, 2, 64, scratch, {})
    for _ in range(2 if impl.needs_plan else 0):
        impl.plan(inputs)
    impl.begin_step(inputs)
    impl.forward(chain.q, chain.kv_caches[0], chain.outs[0], chain.sinks)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_served_exactly_where_the_library_takes_its_calls(library, name):
    backend = registry.get(name)
    card = replace(H200, capability=(10, 0)) if name == "flashinfer_trtllm_gen" else H200
    served = [spec for spec in LAYERS if backend.support(spec, card).ok]
    misfit = pytest.raises((AttributeError, TypeError), match="|".join(BY_POSITION[name]))
    with nullcontext() if served else misfit:
        for spec in served or LAYERS[:1]:
            step(backend, spec)
        assert library.by_position == BY_POSITION[name]

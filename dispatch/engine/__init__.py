"""What an engine calls: flags in, an implementation for each step out."""

from dispatch.engine.groups import EngineFacts, LayerGroup
from dispatch.engine.prepare import BuiltImpls, prepare_fmha_impl
from dispatch.engine.runner import DecodeGraphRunner

__all__ = ["BuiltImpls", "DecodeGraphRunner", "EngineFacts", "LayerGroup", "prepare_fmha_impl"]

"""What an engine calls: flags in, an implementation for each step out."""

from dispatch.engine.prepare import BuiltImpls, prepare_fmha_impl

__all__ = ["BuiltImpls", "prepare_fmha_impl"]

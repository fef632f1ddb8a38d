"""Decode attention backends: the contract, the registry, and one file a library family."""

from dispatch.backends.base import SUPPORTED, Backend, DecodeImpl, KVCache, Support, refuse
from dispatch.backends.registry import Registry, registry

__all__ = ["SUPPORTED", "Backend", "DecodeImpl", "KVCache", "Registry", "Support", "refuse", "registry"]

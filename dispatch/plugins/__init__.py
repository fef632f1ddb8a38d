"""Adapters for serving engines. Each imports its engine only when the engine loads it."""

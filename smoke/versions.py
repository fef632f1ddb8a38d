"""Versions of the libraries whose kernels are measured."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

LIBRARIES = ("torch", "flashinfer-python", "tokenspeed-fa3", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13")


def versions() -> dict[str, Any]:
    """By library; None where it is not installed."""
    found: dict[str, Any] = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = None
    with suppress(RuntimeError):  # torch found another cuDNN than it was built for
        found["cudnn"] = torch.backends.cudnn.version()
    return found

"""What several files' tests run in."""

from __future__ import annotations

import os

# Read when torch is loaded, here and in child processes. Tensors are small: their threads would mostly wait for one
# another, and where something else computes too, several times as long as the work takes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

# Read by Triton when its kernels are defined: without a GPU they run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.pop("COLUMNS", None)  # tables are as wide as in a pipe, wherever the tests run

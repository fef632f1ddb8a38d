"""What several files' tests run in."""

from __future__ import annotations

import os

import pytest
import torch

# Read by Triton when its kernels are defined: without a GPU they run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def on_one_thread():
    """As the smoke commands run, in which torch's threads would cost more than they save."""
    import torch

    from smoke.threads import one_thread

    before = torch.get_num_threads()
    one_thread()
    yield
    torch.set_num_threads(before)

"""What several files' tests run in."""

from __future__ import annotations

import pytest


@pytest.fixture
def on_one_thread():
    """As the smoke commands run, in which torch's threads would cost more than they save."""
    import torch

    from smoke.threads import one_thread

    before = torch.get_num_threads()
    one_thread()
    yield
    torch.set_num_threads(before)

"""Where vLLM's model runner lets a plan come in: before it captures graphs, and after; and what it takes to run."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dispatch.errors import DispatchError, one_line
from dispatch.plugins.vllm import leave_alone
from dispatch.plugins.vllm.memory import note_activations
from dispatch.plugins.vllm.prepare import prepare


def hook() -> None:
    """Have `prepare` run before graphs are captured, and `capture` behind it. A second call changes nothing."""
    original, profile = GPUModelRunner.capture_model, GPUModelRunner.profile_run
    if hasattr(original, "decode_dispatch"):
        return

    @functools.wraps(original)
    def capture_model(self: GPUModelRunner) -> int:
        served = _tried(prepare, self)
        taken = original(self)
        if served:
            _tried(served.capture, self, original)
        return taken

    @functools.wraps(profile)
    def profile_run(self: GPUModelRunner) -> None:
        profile(self)
        _tried(note_activations, self)

    capture_model.decode_dispatch = True  # type: ignore[attr-defined]
    GPUModelRunner.capture_model, GPUModelRunner.profile_run = capture_model, profile_run


def _tried(work: Any, *args: Any) -> Any:
    """What it returns, or None and a line in the log: vLLM starts, whatever goes wrong here."""
    try:
        return work(*args)
    except Exception as error:
        why = str(error) if isinstance(error, DispatchError) else one_line(error)
        leave_alone(why)
        return None
